package catalog

import "pando/internal/driver"

// LineageSum adds up the objects of one kind that descend from one generation, as last measured.
type LineageSum struct {
	Golden         string      `json:"golden"` // "": none
	Generation     int         `json:"generation"`
	Kind           driver.Kind `json:"kind"` // generation, volume, snapshot; layer: of a golden that was removed
	Objects        int         `json:"objects"`
	LogicalBytes   int64       `json:"logical_bytes"`
	ExclusiveBytes int64       `json:"exclusive_bytes"`
	SharedBytes    int64       `json:"shared_bytes"`
}

// Lineage adds up all objects that the scope admits, in the order of goldens and generations.
func (t *Tx) Lineage() ([]LineageSum, error) {
	s := ScopeOf(t.ctx)
	where, args := `id <> ''`, []any{}
	if s != nil {
		where = `kind IN ('generation', 'volume', 'snapshot')`
	}
	if s != nil && !(s.All && s.Reads) {
		where = `(kind = 'generation' OR ` + ofUser + ` OR kind = 'snapshot' AND volume IN
			(SELECT CASE volume WHEN '' THEN id ELSE volume END FROM objects WHERE ` + ofUser + `))`
		args = append(args, uidKey(s.UID), uidKey(s.UID))
	}

	var out []LineageSum
	err := t.eachRow(`SELECT golden, generation, kind, count(*), sum(logical), sum(exclusive), sum(shared) FROM objects
		WHERE `+where+` GROUP BY golden, generation, kind ORDER BY golden, generation, kind`, args, func(sc scanner) error {
		var l LineageSum
		err := sc.Scan(&l.Golden, &l.Generation, &l.Kind, &l.Objects, &l.LogicalBytes, &l.ExclusiveBytes, &l.SharedBytes)
		if l.Kind != driver.Generation || s.SeesGolden(l.Golden) {
			out = append(out, l)
		}
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}
