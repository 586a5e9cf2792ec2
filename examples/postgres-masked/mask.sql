-- What must not leave production. VACUUM FULL also removes the former versions of the rows.
begin;
update customers set
  name = 'customer ' || id,
  email = 'customer-' || id || '@example.com';
commit;
vacuum full customers;
