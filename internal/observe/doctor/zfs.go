package doctor

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/zfs"
)

// Facts describes a zpool, its dedup table and the copies in it.
type Facts struct {
	Pool           string            `json:"pool"`
	Version        string            `json:"version"` // of the module
	SizeBytes      int64             `json:"size_bytes"`
	AllocatedBytes int64             `json:"allocated_bytes"`
	FreeBytes      int64             `json:"free_bytes"`
	Datasets       []Dataset         `json:"datasets"`              // with dedup other than off
	DatasetsTotal  int               `json:"datasets_total"`        // filesystems and volumes of the pool
	DDT            *DDT              `json:"ddt"`                   // null: unknown
	DDTUnknown     string            `json:"ddt_unknown,omitempty"` // why
	Quota          string            `json:"dedup_table_quota,omitempty"`
	MemoryBytes    int64             `json:"memory_bytes"`  // of the host; 0: unknown
	ARCMaxBytes    int64             `json:"arc_max_bytes"` // 0: unknown
	Media          Media             `json:"media"`         //
	Cloning        Cloning           `json:"block_cloning"` //
	Copies         *Copies           `json:"copies"`        // null: dedup saves nothing, so they were not looked for
	Features       map[string]string `json:"features"`      // of those that matter here: disabled, enabled or active
	// WrittenBytes is the size of all datasets and snapshots, each block counted as often as it was written.
	WrittenBytes  int64     `json:"written_bytes"`
	UnsharedBytes Range     `json:"unshared_bytes"` // of WrittenBytes, without an entry in the DDT; includes metadata
	datasets      []Dataset // all
}

// Dataset is a filesystem or volume of ZFS.
type Dataset struct {
	Name            string `json:"name"`
	Type            string `json:"type"` // filesystem or volume
	Dedup           string `json:"dedup"`
	From            string `json:"dedup_from"` // "local", "received", "default", or the dataset that it is inherited from
	ReferencedBytes int64  `json:"referenced_bytes"`
	LogicalBytes    int64  `json:"logical_bytes"`    // referenced, not compressed
	Origin          string `json:"origin,omitempty"` // snapshot that it is a clone of
	writtenBytes    int64  // of it and its snapshots, without blocks that it shares with its origin
	volumeBytes     int64
	blockBytes      int64 // of a volume
}

// Media counts the disks that hold the pool's dedup table.
type Media struct {
	Rotating int      `json:"rotating"` // disks the kernel reports as rotating
	Solid    int      `json:"solid"`
	Unknown  int      `json:"unknown"`           // files, and missing disks
	Helpers  []string `json:"classes,omitempty"` // "special", "dedup": classes of vdevs that hold the table instead
}

// Cloning describes block cloning (the BRT), by which `cp --reflink` shares blocks.
type Cloning struct {
	Known      bool   `json:"known"`       // false: this OpenZFS has no block cloning
	Feature    string `json:"feature"`     // disabled, enabled or active
	Enabled    string `json:"zfs_enabled"` // the module's zfs_bclone_enabled: "1", "0", or "" without such a switch
	UsedBytes  int64  `json:"used_bytes"`
	SavedBytes int64  `json:"saved_bytes"`
	Ratio      string `json:"ratio"`
}

// Shares reports whether `cp --reflink` shares blocks between filesystems here.
func (c Cloning) Shares() bool {
	return c.Known && (c.Feature == "enabled" || c.Feature == "active") && c.Enabled != "0"
}

// ZFSRequest selects a zpool to examine.
type ZFSRequest struct {
	Pool  string        // name of an imported zpool
	Limit time.Duration // time that the search for copies may take; the rest has no limit
}

// Pools returns the names of the imported zpools. Unsupported, with a hint: this host has no ZFS.
func Pools(ctx context.Context) ([]string, error) {
	if err := zfs.Available(); err != nil {
		return nil, err
	}

	rows, err := zfs.Zpool.Rows(ctx, 1, "list", "-Hp", "-o", "name")
	if err != nil {
		return nil, err
	}

	var out []string
	for _, r := range rows {
		out = append(out, r[0])
	}

	return out, nil
}

// ZFS examines dedup and block cloning of a zpool. It writes nothing to the pool, and does not change access times.
// NotFound, with the names of the imported pools: the pool does not exist. Unsupported: this host has no ZFS. Damaged:
// the output of a tool cannot be parsed, except that of the dedup table, which is unknown then.
func ZFS(ctx context.Context, q ZFSRequest) (*Report, error) {
	pools, err := Pools(ctx)
	if err != nil {
		return nil, err
	}

	if !slices.Contains(pools, q.Pool) {
		e := errs.New(errs.NotFound, "doctor", strconv.Quote(q.Pool), "zpool does not exist")
		if len(pools) == 0 {
			return nil, e.WithHint("no zpool is imported: run `zpool import` to list pools that can be imported")
		}
		return nil, e.WithHint("imported zpools: %s", strings.Join(pools, ", "))
	}

	// Collect the facts.
	f := &Facts{Pool: q.Pool, Version: zfs.Version(), Features: map[string]string{}}
	for _, look := range []func(context.Context) error{f.readPool, f.readDatasets, f.readDDT, f.readMedia} {
		if err := look(ctx); err != nil {
			return nil, err
		}
	}

	f.readMemory()

	if f.DDT != nil {
		f.UnsharedBytes = exactly(f.WrittenBytes).minus(f.DDT.Referenced)
		if f.DDT.Saved().High > 0 {
			if f.Copies, err = f.findCopies(ctx, q.Limit); err != nil {
				return nil, err
			}
		}
	}

	return f.report(), nil
}

// readMemory reads how much memory the host has, and how much of it the ARC may use.
func (f *Facts) readMemory() {
	if mem, err := kernel.ReadMemory(); err == nil {
		f.MemoryBytes = mem.Total
	}
	f.ARCMaxBytes = readTable("/proc/spl/kstat/zfs/arcstats", "c_max", 2)
}

// unsharedIf returns the bytes of the datasets with dedup that have no entry in the dedup table, on the condition that
// no other dataset has entries in it.
func (f *Facts) unsharedIf() Range {
	written := int64(0)
	for _, d := range f.Datasets {
		written += d.writtenBytes
	}
	return exactly(written).minus(f.DDT.Referenced)
}

// readPool reads the properties of the pool. It asks `zpool get` for all, because not every version has each of them.
func (f *Facts) readPool(ctx context.Context) error {
	rows, err := zfs.Zpool.Rows(ctx, 2, "get", "-Hp", "-o", "property,value", "all", f.Pool)
	if err != nil {
		return err
	}

	p := map[string]string{}
	for _, r := range rows {
		p[r[0]] = r[1]
	}

	for name, to := range map[string]*int64{
		"size": &f.SizeBytes, "allocated": &f.AllocatedBytes, "free": &f.FreeBytes,
		"bcloneused": &f.Cloning.UsedBytes, "bclonesaved": &f.Cloning.SavedBytes,
	} {
		if *to, err = zfs.Number(p[name]); err != nil {
			return err
		}
	}

	// Block cloning and other features.
	f.Quota = p["dedup_table_quota"]
	_, f.Cloning.Known = p["bcloneused"]
	f.Cloning.Ratio, f.Cloning.Feature = p["bcloneratio"], p["feature@block_cloning"]
	b, err := os.ReadFile("/sys/module/zfs/parameters/zfs_bclone_enabled")
	if err == nil {
		f.Cloning.Enabled = strings.TrimSpace(string(b))
	}

	for _, name := range []string{"block_cloning", "fast_dedup", "allocation_classes"} {
		if v, ok := p["feature@"+name]; ok {
			f.Features[name] = v
		}
	}

	return nil
}

// datasetProperties are what readDatasets asks for.
var datasetProperties = []string{"type", "dedup", "referenced", "logicalreferenced", "usedbydataset", "usedbysnapshots",
	"origin", "volsize", "volblocksize"}

// readDatasets reads the datasets of the pool.
func (f *Facts) readDatasets(ctx context.Context) error {
	rows, err := zfs.ZFS.Rows(ctx, 4, "get", "-Hpr", "-t", "filesystem,volume",
		"-o", "name,property,value,source", strings.Join(datasetProperties, ","), f.Pool)
	if err != nil {
		return err
	}

	f.datasets, err = parseDatasets(rows)
	if err != nil {
		return err
	}

	f.DatasetsTotal = len(f.datasets)
	f.Datasets = []Dataset{} // not null in JSON
	for _, d := range f.datasets {
		f.WrittenBytes += d.writtenBytes
		if d.Dedup != "off" {
			f.Datasets = append(f.Datasets, d)
		}
	}

	return nil
}

// parseDatasets parses rows of `zfs get`: name, property, value and source. Rows of one dataset follow each other.
func parseDatasets(rows [][]string) ([]Dataset, error) {
	var out []Dataset
	for _, r := range rows {
		name, property, value, source := r[0], r[1], r[2], r[3]
		if len(out) == 0 || out[len(out)-1].Name != name {
			out = append(out, Dataset{Name: name})
		}

		// Find where the value belongs.
		d := &out[len(out)-1]
		var to *int64
		used := int64(0)
		switch property {
		case "type":
			d.Type = value
		case "dedup":
			d.Dedup, d.From = value, strings.TrimPrefix(source, "inherited from ")
		case "origin":
			if value != "-" {
				d.Origin = value
			}
		case "referenced":
			to = &d.ReferencedBytes
		case "logicalreferenced":
			to = &d.LogicalBytes
		case "usedbydataset", "usedbysnapshots":
			to = &used
		case "volsize":
			to = &d.volumeBytes
		case "volblocksize":
			to = &d.blockBytes
		}

		if to != nil {
			var err error
			if *to, err = zfs.Number(value); err != nil {
				return nil, err
			}
		}

		d.writtenBytes += used
	}

	for _, d := range out {
		if d.Type == "" || d.Dedup == "" {
			return nil, errs.New(errs.Damaged, "zfs get", d.Name, "type or dedup property is missing")
		}
	}

	return out, nil
}

// readDDT reads the figures of the dedup table: exactly if zpool can print JSON, otherwise to three digits. A table
// larger than AllocatedBytes, if that is known, is implausible and so unknown.
func (f *Facts) readDDT(ctx context.Context) error {
	out, err := zfs.Zpool.Output(ctx, "status", "-D", "-j", "-p", "--json-int", f.Pool)
	switch {
	case err == nil:
		f.DDT, err = parseDDTJSON(out, f.Pool)
	case errs.Is(err, errs.Unsupported): // it has no -j: before 2.3
		if out, err = zfs.Zpool.Output(ctx, "status", "-D", f.Pool); err != nil {
			return err
		}
		f.DDT, err = parseDDTText(string(out))
	default:
		return err
	}
	if err == nil && f.AllocatedBytes > 0 && f.DDT.OnDisk.Low > f.AllocatedBytes {
		err = errs.New(errs.Damaged, "zpool status", f.Pool, "the dedup table is larger than the allocated space of the pool")
	}
	if err != nil {
		f.DDT, f.DDTUnknown = nil, "cannot parse the output of `zpool status -D`: "+err.Error()
	}
	if f.DDT != nil {
		f.DDT.InLog = inLog(f.Pool)
	}

	return nil
}

// inLog returns the number of entries in the log of the dedup table, which the feature fast_dedup added: the sum over
// the tables of all checksums. It returns nil if the kernel does not report it.
func inLog(pool string) *int64 {
	files, err := filepath.Glob(filepath.Join("/proc/spl/kstat/zfs", pool, "ddt_stats_*"))
	if err != nil || len(files) == 0 {
		return nil
	}
	sum := int64(0)
	for _, f := range files {
		sum += readTable(f, "log_active_entries", 2) + readTable(f, "log_flushing_entries", 2)
	}
	return &sum
}

// readMedia reads the disks that hold the dedup table.
func (f *Facts) readMedia(ctx context.Context) error {
	out, err := zfs.Zpool.Output(ctx, "list", "-HvP", f.Pool)
	if err != nil {
		return err
	}
	f.Media = parseMedia(string(out), rotates)
	return nil
}

// parseMedia parses the output of `zpool list -HvP`: the pool, then its vdevs, indented by a tab, with classes of vdevs
// as headings in between.
func parseMedia(out string, rotates func(disk string) (bool, error)) (m Media) {
	class, first := "", true
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
		case first:
			first = false // the pool itself
		case !strings.HasPrefix(line, "\t"): // a heading
			if class = f[0]; class == "special" || class == "dedup" {
				m.Helpers = append(m.Helpers, class)
			}
		case class == "" && strings.HasPrefix(f[0], "/"):
			turns, err := rotates(f[0])
			switch {
			case err != nil:
				m.Unknown++
			case turns:
				m.Rotating++
			default:
				m.Solid++
			}
		}
	}

	return m
}

// rotates asks the kernel whether a disk, or the disk of a partition, rotates.
func rotates(path string) (bool, error) {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return false, err
	}

	dir, err := filepath.EvalSymlinks(filepath.Join("/sys/class/block", filepath.Base(path)))
	if err != nil {
		return false, err
	}

	b, err := os.ReadFile(filepath.Join(dir, "queue/rotational"))
	if err != nil {
		b, err = os.ReadFile(filepath.Join(filepath.Dir(dir), "queue/rotational"))
	}

	return strings.TrimSpace(string(b)) == "1", err
}

// readTable reads a number from a table of the kernel: the column of the row that begins with name. It returns 0 if the
// table or the row does not exist.
func readTable(path, name string, column int) int64 {
	file, err := os.Open(path)
	if err != nil {
		return 0
	}

	defer file.Close()
	s := bufio.NewScanner(file)
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) > column && f[0] == name {
			n, _ := strconv.ParseInt(f[column], 10, 64)
			return max(n, 0)
		}
	}

	return 0
}
