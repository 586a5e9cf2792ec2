package service

import (
	"maps"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/prometheus/client_golang/prometheus"
)

// maxMetricsGoldens limits the goldens with metrics of their own: those with the most clones, then the newest.
const maxMetricsGoldens = 500

// poolDescs are all metrics of a pool.
var poolDescs []*prometheus.Desc

// describe adds a metric of a pool.
func describe(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc("pando_"+name, help, labels, nil)
	poolDescs = append(poolDescs, d)
	return d
}

// Metrics of scrapes.
var (
	descScrapeSuccess = describe("scrape_success",
		"1 if a part of the metrics could be read, else 0; its metrics are then missing.", "part")
	descScrapeSeconds = describe("scrape_duration_seconds",
		"Time that it took to read the figures of the pool.")
)

// Metrics of the space of the pool.
var (
	descPoolInfo = describe("pool_info",
		"The pool; always 1.", "pool_id", "directory", "driver")
	descSize = describe("pool_size_bytes",
		"Size of the filesystem or dataset of the pool.")
	descUsed = describe("pool_used_bytes",
		"Space in use in it, including what is not the pool's.")
	descFree = describe("pool_free_bytes",
		"Space that can be written before something is full.")
	descHostFree = describe("pool_host_free_bytes",
		"Free space below the pool: of a pool in a file, that of the host.")
	descMinFree = describe("pool_min_free_bytes",
		"With less free space than this, new data is refused.")
	descReserve = describe("pool_reserve_complete",
		"1 if the space that cleaning up a full pool needs is reserved, else 0.")
)

// Metrics of objects.
var (
	descObjects = describe("objects",
		"Objects by kind: volume, snapshot, generation, layer (a destroyed generation that overlays need).", "kind")
	descLogical = describe("logical_bytes",
		"Space that full copies would take, as last measured.", "kind")
	descExclusive = describe("exclusive_bytes",
		"Space that no other object shares, as last measured.", "kind")
	descUnmeasured = describe("unmeasured_objects",
		"Objects whose space was never measured. Their estimates count.", "kind")
	descOldestMeasured = describe("oldest_measurement_timestamp_seconds",
		"Time of the oldest of these measurements.")
	descMounted = describe("mounted_volumes", "Volumes that are mounted.")
	descExpired = describe("expired_volumes",
		"Volumes that have expired and still exist, for example because they are in use.")
	descUnsealed = describe("unsealed_generations",
		"Results of builds that are to be stored in fewer extents.")
	descDeleted = describe("deleted_objects",
		"Destroyed objects that still take space: until they are removed (reclaim), or while overlays need "+
			"them (clones).", "held_by")
	descDeletedBytes = describe("deleted_bytes",
		"Space of such objects that no other object shares, as last measured.", "held_by")
	descOldestDeleted = describe("oldest_deleted_timestamp_seconds",
		"When the oldest of the objects that are still to be removed was destroyed.")
	descMarks = describe("marks",
		"Objects that operations of any process are working on, by operation.", "op")
	descOldestMark = describe("oldest_mark_timestamp_seconds",
		"When the oldest of these operations began.")
)

// Metrics of each golden.
var (
	descGoldens        = describe("goldens", "Goldens.")
	descGoldensOmitted = describe("goldens_omitted",
		"Goldens without metrics of their own, because there are too many.")
	descGoldenGenerations = describe("golden_generations",
		"Generations of the golden that exist.", "golden")
	descGoldenClones = describe("golden_clones",
		"Volumes that descend from the golden.", "golden")
	descGoldenLogical = describe("golden_logical_bytes",
		"Space that full copies of its generations would take, as last measured.", "golden")
	descGoldenExclusive = describe("golden_exclusive_bytes",
		"Space of its generations that no other object shares, as last measured.", "golden")
	descCloneExclusive = describe("golden_clones_exclusive_bytes",
		"Space of its clones that no other object shares, as last measured.", "golden")
	descGoldenBuilds = describe("golden_cached_builds",
		"Its generations that a command has built, and that builds can reuse.", "golden")
	descGoldenCurrent = describe("golden_current_timestamp_seconds",
		"When the current generation of the golden was made.", "golden")
	descGoldenPushed = describe("golden_last_push_timestamp_seconds",
		"When the golden was last pushed successfully, even if nothing had changed.", "golden", "remote")
)

// Metrics of remotes.
var (
	descRemoteAdded = describe("remote_added_timestamp_seconds",
		"When the remote was added.", "remote")
	descRemotePushed = describe("remote_last_push_timestamp_seconds",
		"When anything was last pushed to the remote successfully, even if nothing had changed.", "remote")
)

// Metrics of volumes, on request.
var (
	descVolumeLogical = describe("volume_logical_bytes",
		"Space that a full copy of the volume would take, as last measured.", "volume", "golden")
	descVolumeExclusive = describe("volume_exclusive_bytes",
		"Space of the volume that no other object shares, as last measured.", "volume", "golden")
	descVolumeMounted = describe("volume_mounted",
		"1 if the volume is mounted, else 0.", "volume", "golden")
	descVolumePushed = describe("volume_last_push_timestamp_seconds",
		"When the volume was last pushed successfully, even if nothing had changed.", "volume", "remote")
	descVolumesOmitted = describe("volumes_omitted",
		"Volumes without metrics of their own.")
)

// Metrics of what happens.
var (
	descEvents = describe("events_total",
		"Events of the history, of all processes that use the pool, since the first scrape.", "verb")
	descRecovered = describe("recovery_actions_total",
		"What this process cleaned up after others: interrupted operations (undone), destroyed objects "+
			"(reclaimed), expired "+"volumes, and after a boot garbage, stale mounts and loop devices.", "action")
	descMaintenanceErrors = describe("maintenance_errors_total",
		"Errors that maintenance ended with, by kind.", "kind")
	descMaintenanceAt = describe("maintenance_last_success_timestamp_seconds",
		"When maintenance last succeeded.")
)

// sender sends metrics to Prometheus.
type sender chan<- prometheus.Metric

func (out sender) gauge(d *prometheus.Desc, v float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, valid(labels)...)
}

func (out sender) counter(d *prometheus.Desc, v float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, valid(labels)...)
}

// time sends a time, unless there was none.
func (out sender) time(d *prometheus.Desc, at time.Time, labels ...string) {
	if !at.IsZero() {
		out.gauge(d, float64(at.UnixMilli())/1000, labels...)
	}
}

func (out sender) flag(d *prometheus.Desc, v bool, labels ...string) {
	n := 0.0
	if v {
		n = 1
	}
	out.gauge(d, n, labels...)
}

// valid makes labels valid UTF-8: the directory of a pool may be anything.
func valid(labels []string) []string {
	out := make([]string, len(labels))
	for i, l := range labels {
		out[i] = strings.ToValidUTF8(l, "�")
	}
	return out
}

// send sends what was read.
func (r *reading) send(to chan<- prometheus.Metric, s *Service) {
	out := sender(to)
	for _, part := range []string{partCatalogue, partHistory, partRemotes, partSpace} {
		out.flag(descScrapeSuccess, r.errs[part] == nil, part)
	}
	out.gauge(descScrapeSeconds, r.took.Seconds())
	out.gauge(descPoolInfo, 1, s.e.PoolID(), s.e.Dir(), s.e.Caps().Name)

	if r.errs[partSpace] == nil {
		r.sendSpace(out)
	}
	if r.errs[partCatalogue] == nil {
		r.sendObjects(out)
		r.sendGoldens(out)
		r.sendVolumes(out, s.MetricsVolumes)
	}
	for _, remote := range r.remotes {
		out.time(descRemoteAdded, remote.AddedAt, remote.Name)
		out.time(descRemotePushed, r.pool.Totals.PushedAt[remote.Mark.ID.String()], remote.Name)
	}
	for verb, n := range r.events {
		out.counter(descEvents, float64(n), verb)
	}
	if r.pool.Recovered.Errors != nil {
		r.sendRecovered(out)
	}
}

func (r *reading) sendSpace(out sender) {
	s := r.pool.Space
	out.gauge(descSize, float64(s.TotalBytes))
	out.gauge(descUsed, float64(s.UsedBytes))
	out.gauge(descFree, float64(s.FreeBytes))
	out.gauge(descHostFree, float64(s.HostFreeBytes))
	out.gauge(descMinFree, float64(s.MinFreeBytes))
	out.flag(descReserve, s.HasReserve)
}

func (r *reading) sendObjects(out sender) {
	t := r.pool.Totals
	var oldest time.Time
	for _, kind := range []driver.Kind{driver.Volume, driver.Snapshot, driver.Generation, driver.Layer} {
		k := t.Kinds[kind]
		out.gauge(descObjects, float64(k.Objects), string(kind))
		out.gauge(descLogical, float64(k.LogicalBytes), string(kind))
		out.gauge(descExclusive, float64(k.OwnedBytes), string(kind))
		out.gauge(descUnmeasured, float64(k.Unmeasured), string(kind))
		if at := k.OldestMeasurement; oldest.IsZero() || !at.IsZero() && at.Before(oldest) {
			oldest = at
		}
	}
	out.time(descOldestMeasured, oldest)

	out.gauge(descMounted, float64(t.Mounted))
	out.gauge(descExpired, float64(t.Expired))
	out.gauge(descUnsealed, float64(t.Unsealed))

	layers := t.Kinds[driver.Layer]
	out.gauge(descDeleted, float64(t.Unreclaimed), "reclaim")
	out.gauge(descDeletedBytes, float64(t.UnreclaimedBytes), "reclaim")
	out.gauge(descDeleted, float64(layers.Objects), "clones")
	out.gauge(descDeletedBytes, float64(layers.OwnedBytes), "clones")
	out.time(descOldestDeleted, t.OldestUnreclaimed)

	for op, n := range t.Marks {
		out.gauge(descMarks, float64(n), op)
	}
	out.time(descOldestMark, t.OldestMark)
}

func (r *reading) sendGoldens(out sender) {
	goldens := slices.Collect(maps.Values(r.pool.Totals.Goldens))
	goldens = slices.DeleteFunc(goldens, func(g *engine.GoldenTotals) bool { return g.CurrentAt.IsZero() }) // was removed
	out.gauge(descGoldens, float64(len(goldens)))

	shown := min(len(goldens), maxMetricsGoldens)
	out.gauge(descGoldensOmitted, float64(len(goldens)-shown))
	slices.SortFunc(goldens, func(a, b *engine.GoldenTotals) int {
		if n := b.Clones.Objects - a.Clones.Objects; n != 0 {
			return n
		}
		return b.CurrentAt.Compare(a.CurrentAt)
	})

	for _, g := range goldens[:shown] {
		out.gauge(descGoldenGenerations, float64(g.Generations.Objects), g.Name)
		out.gauge(descGoldenClones, float64(g.Clones.Objects), g.Name)
		out.gauge(descGoldenLogical, float64(g.Generations.LogicalBytes), g.Name)
		out.gauge(descGoldenExclusive, float64(g.Generations.OwnedBytes), g.Name)
		out.gauge(descCloneExclusive, float64(g.Clones.OwnedBytes), g.Name)
		out.gauge(descGoldenBuilds, float64(g.Builds), g.Name)
		out.time(descGoldenCurrent, g.CurrentAt, g.Name)
		for _, remote := range r.remotes {
			out.time(descGoldenPushed, g.PushedAt[remote.Mark.ID.String()], g.Name, remote.Name)
		}
	}
}

func (r *reading) sendVolumes(out sender, limit int) {
	if limit == 0 {
		return
	}

	for _, v := range r.pool.Volumes {
		out.gauge(descVolumeLogical, float64(v.LogicalBytes), v.Name, v.Golden)
		out.gauge(descVolumeExclusive, float64(v.OwnedBytes), v.Name, v.Golden)
		out.flag(descVolumeMounted, v.Mounted, v.Name, v.Golden)
		for _, remote := range r.remotes {
			out.time(descVolumePushed, v.PushedAt[remote.Mark.ID.String()], v.Name, remote.Name)
		}
	}
	all := r.pool.Totals.Kinds[driver.Volume].Objects
	out.gauge(descVolumesOmitted, float64(all-len(r.pool.Volumes)))
}

func (r *reading) sendRecovered(out sender) {
	a := r.pool.Recovered
	for action, n := range map[string]int64{"undone": a.Undone, "reclaimed": a.Reclaimed, "expired": a.Expired,
		"garbage": a.Garbage, "stale_mount": a.StaleMounts, "loop_device": a.LoopDevices} {
		out.counter(descRecovered, float64(n), action)
	}
	for _, kind := range errs.Kinds() {
		out.counter(descMaintenanceErrors, float64(a.Errors[kind]), string(kind))
	}
	out.time(descMaintenanceAt, a.LastAt)
}
