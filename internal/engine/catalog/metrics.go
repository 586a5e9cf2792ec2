package catalog

import (
	"context"
	"time"

	"pando/internal/driver"
	"pando/internal/linux/kernel"
)

// Sums adds up objects, with their sizes as last measured.
type Sums struct {
	Objects, Unmeasured      int
	LogicalBytes, OwnedBytes int64 // OwnedBytes are those that no other object shares
	OldestMeasurement        time.Time
}

func (s *Sums) add(o Sums) {
	s.Objects, s.Unmeasured = s.Objects+o.Objects, s.Unmeasured+o.Unmeasured
	s.LogicalBytes, s.OwnedBytes = s.LogicalBytes+o.LogicalBytes, s.OwnedBytes+o.OwnedBytes
	s.OldestMeasurement = older(s.OldestMeasurement, o.OldestMeasurement)
}

// older returns the older of two times; one that is zero is unknown.
func older(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// GoldenTotals describes a golden.
type GoldenTotals struct {
	Name                string
	Generations, Clones Sums // Clones are volumes that descend from any of its generations
	Builds              int  // generations that a command has built
	CurrentAt           time.Time
	PushedAt            map[string]time.Time // by repository
}

// Totals describes the whole catalogue, for monitoring.
type Totals struct {
	Kinds    map[driver.Kind]Sums
	Goldens  map[string]*GoldenTotals
	Mounted  int
	Expired  int // volumes that have expired and still exist
	Unsealed int

	Unreclaimed       int // objects that were destroyed, and still take space
	UnreclaimedBytes  int64
	OldestUnreclaimed time.Time

	Marks      map[string]int // by operation
	OldestMark time.Time

	PushedAt map[string]time.Time // the last successful push to each repository
}

// metricsIndex has all that Totals reads of each object, in the order in which it adds up. Without it a query sorts all
// objects, which takes five times as long. It is no part of the schema: only pools that are monitored have it, and pay
// for it. Its condition, which always holds, keeps other queries from choosing it.
const metricsIndex = `CREATE INDEX IF NOT EXISTS metrics
	ON objects(kind, golden, logical, exclusive, measured_at) WHERE id <> ''`

// IndexMetrics makes Totals fast, once and for all. NoSpace, Permission.
func (c *Catalog) IndexMetrics(ctx context.Context) error {
	there := false
	err := c.View(ctx, func(tx *Tx) error {
		return tx.eachRow(`SELECT 1 FROM sqlite_schema WHERE name = 'metrics'`, nil, func(scanner) error {
			there = true
			return nil
		})
	})
	if err != nil || there {
		return err
	}
	return c.Update(ctx, Soft, func(tx *Tx) error {
		_, err := tx.exec(metricsIndex)
		return err
	})
}

// totalsQuery reads everything for Totals. Each row says what it is about, and has the columns that this needs.
const totalsQuery = `
	SELECT 'objects', kind, golden, count(*), sum(measured_at = 0), sum(logical), sum(exclusive),
		coalesce(min(nullif(measured_at, 0)), 0)
		FROM objects WHERE id <> '' GROUP BY kind, golden
	UNION ALL SELECT 'build', golden, '', count(*), 0, 0, 0, 0
		FROM objects WHERE build_key <> '' AND +kind = 'generation' GROUP BY golden
	UNION ALL SELECT 'golden', g.name, coalesce(m.value, ''), 1, 0, 0, 0, coalesce(o.created_at, 0)
		FROM goldens g LEFT JOIN meta m ON m.key = 'pushed-@' || g.name
		LEFT JOIN objects o ON o.kind = 'generation' AND o.golden = g.name AND o.generation = g.current
	UNION ALL SELECT 'pushed', substr(key, 11), value, 1, 0, 0, 0, 0 FROM meta WHERE key GLOB 'pushed-to-*'
	UNION ALL SELECT 'tombstones', '', '', count(*), 0, coalesce(sum(bytes), 0), 0, coalesce(min(at), 0)
		FROM tombstones WHERE reclaimed = 0
	UNION ALL SELECT 'mounts', ?2, '', count(*), 0, 0, 0, coalesce(max(at), 0) FROM attachments WHERE boot = ?2
	UNION ALL SELECT 'mounts', boot, '', count(*), 0, 0, 0, max(at) FROM attachments WHERE boot <> ?2 GROUP BY boot
	UNION ALL SELECT 'marks', op, '', count(*), 0, 0, 0, min(at) FROM marks GROUP BY op
	UNION ALL SELECT 'expired', '', '', count(*), 0, 0, 0, 0
		FROM objects WHERE expires_at > 0 AND expires_at <= ?1 AND pinned <= ?1
	UNION ALL SELECT 'unsealed', '', '', count(*), 0, 0, 0, 0 FROM unsealed`

// Totals adds up the whole catalogue in one query, which reads no more than an index of the objects: see IndexMetrics.
func (t *Tx) Totals() (Totals, error) {
	out := Totals{Kinds: map[driver.Kind]Sums{}, Goldens: map[string]*GoldenTotals{}, Marks: map[string]int{},
		PushedAt: map[string]time.Time{}}
	err := t.eachRow(totalsQuery, []any{toNano(time.Now()), kernel.BootID()}, func(s scanner) error {
		var r totalsRow
		var at int64
		err := s.Scan(&r.about, &r.name, &r.text, &r.n, &r.sums.Unmeasured, &r.sums.LogicalBytes, &r.sums.OwnedBytes, &at)
		r.at = fromNano(at)
		r.sums.Objects, r.sums.OldestMeasurement = r.n, r.at
		out.addRow(r)
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}

// totalsRow is a row of totalsQuery.
type totalsRow struct {
	about, name, text string
	n                 int
	sums              Sums
	at                time.Time
}

func (o *Totals) addRow(r totalsRow) {
	switch r.about {
	case "objects":
		o.addObjects(driver.Kind(r.name), r.text, r.sums)
	case "build":
		o.golden(r.name).Builds = r.n
	case "golden":
		g := o.golden(r.name)
		g.CurrentAt, g.PushedAt = r.at, parsePushed(r.text)
	case "pushed":
		o.PushedAt[r.name] = parseNano(r.text)
	case "tombstones":
		o.Unreclaimed, o.UnreclaimedBytes, o.OldestUnreclaimed = r.n, r.sums.LogicalBytes, r.at
	case "mounts":
		if !kernel.EarlierBoot(r.name, r.at) {
			o.Mounted += r.n
		}
	case "marks":
		o.Marks[r.name], o.OldestMark = r.n, older(o.OldestMark, r.at)
	case "expired":
		o.Expired = r.n
	case "unsealed":
		o.Unsealed = r.n
	}
}

// addObjects adds the objects of a kind that descend from one golden.
func (o *Totals) addObjects(kind driver.Kind, golden string, s Sums) {
	all := o.Kinds[kind]
	all.add(s)
	o.Kinds[kind] = all
	if golden == "" {
		return
	}

	switch kind {
	case driver.Generation:
		o.golden(golden).Generations = s
	case driver.Volume:
		o.golden(golden).Clones = s
	}
}

func (o *Totals) golden(name string) *GoldenTotals {
	if o.Goldens[name] == nil {
		o.Goldens[name] = &GoldenTotals{Name: name}
	}
	return o.Goldens[name]
}

// VolumeTotals describes a volume, for monitoring.
type VolumeTotals struct {
	Name, Golden             string
	LogicalBytes, OwnedBytes int64
	MeasuredAt               time.Time
	Mounted                  bool
	PushedAt                 map[string]time.Time // by repository
}

const largestQuery = `
	WITH largest AS (SELECT id FROM objects WHERE id <> '' AND kind = 'volume' ORDER BY exclusive DESC, id LIMIT ?)
	SELECT o.name, o.golden, o.logical, o.exclusive, o.measured_at, coalesce(a.boot, ''), coalesce(a.at, 0),
		a.id IS NOT NULL, coalesce(m.value, '')
		FROM largest CROSS JOIN objects o ON o.id = largest.id LEFT JOIN attachments a ON a.id = o.id
		LEFT JOIN meta m ON m.key = 'pushed-' || CASE o.volume WHEN '' THEN o.id ELSE o.volume END
		ORDER BY o.exclusive DESC, o.id`

// LargestVolumes returns the volumes with the most bytes that no other object shares, as last measured, the largest
// first.
func (t *Tx) LargestVolumes(limit int) ([]VolumeTotals, error) {
	var out []VolumeTotals
	err := t.eachRow(largestQuery, []any{limit}, func(s scanner) error {
		var v VolumeTotals
		var boot, pushed string
		var measured, at int64
		err := s.Scan(&v.Name, &v.Golden, &v.LogicalBytes, &v.OwnedBytes, &measured, &boot, &at, &v.Mounted, &pushed)
		v.MeasuredAt, v.PushedAt = fromNano(measured), parsePushed(pushed)
		v.Mounted = v.Mounted && !kernel.EarlierBoot(boot, fromNano(at))
		out = append(out, v)
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}
