package mount

import "context"

// ReadLivingTables is ReadTables as on kernels that do not list namespaces.
func ReadLivingTables(ctx context.Context) (*Tables, error) {
	t, err := newTables()
	if err == nil {
		t.readLiving(ctx)
	}
	return t, err
}
