package doctor

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/ref"
)

// report makes findings of the facts.
func (f *Facts) report() *Report {
	r := &Report{Check: "zfs", Subject: f.Pool, Summary: f.summary(), ZFS: f, Findings: []Finding{}}
	for _, find := range []func(*Report){
		f.findUnknownTable, f.findDedupDatasets, f.findTableMemory, f.findUniqueBlocks, f.findSavings, f.findCopiedTrees,
		f.findQuota, f.findRotatingDisks, f.findBlockCloning, f.findMigration,
	} {
		find(r)
	}
	return r
}

// dedups reports whether there is or may be anything to say about dedup.
func (f *Facts) dedups() bool {
	return len(f.Datasets) > 0 || f.DDT == nil || f.DDT.Entries > 0
}

func (f *Facts) summary() string {
	switch {
	case f.DDT == nil:
		return "dedup: the table's figures are unknown"
	case !f.dedups():
		return "no dataset uses dedup and there is no dedup table: it costs nothing here, and there is nothing to do"
	case f.DDT.Entries == 0:
		return "dedup is on, but nothing has been written with it yet: this is the best time to turn it off"
	case len(f.Datasets) == 0:
		return "dedup is off, but blocks written with it are still there, and so is their table"
	}
	return "dedup is on; what it costs and saves is below"
}

const unknownDDT = "the dedup table's figures are unknown"

func (f *Facts) findUnknownTable(r *Report) {
	if f.DDT != nil {
		return
	}
	r.find(Finding{
		Code: "zfs-ddt-unknown", Severity: Warning,
		Title:    unknownDDT,
		Measured: []Figure{unknown("ddt_entries", "entries", Count, f.DDTUnknown)},
		Why:      "What the table costs and saves cannot be said. Nothing below is guessed instead.",
		Do: []Step{{"look at the table yourself, and report what it prints as a bug of pando",
			[]string{"zpool status -D " + word(f.Pool)}}},
	})
}

func (f *Facts) findDedupDatasets(r *Report) {
	if len(f.Datasets) == 0 {
		return
	}

	var referenced, logical int64
	local := 0
	for _, d := range f.Datasets {
		referenced, logical = referenced+d.ReferencedBytes, logical+d.LogicalBytes
		if d.From == "local" || d.From == "received" {
			local++
		}
	}

	r.find(Finding{
		Code: "zfs-dedup-datasets", Severity: Note,
		Title: fmt.Sprintf("%d of %d datasets have dedup on, %d of them by their own setting", len(f.Datasets),
			f.DatasetsTotal, local),
		Measured: []Figure{
			figure("dedup_datasets", "datasets with dedup", Count, int64(len(f.Datasets))),
			figure("dedup_referenced", "they reference", Bytes, referenced).noted("each counted in full"),
			figure("dedup_logical", "uncompressed", Bytes, logical),
		},
		Why: "Every block that is written there is looked up in the dedup table, and gets an entry if it is new. Other " +
			"datasets pay nothing of this.",
	})
}

func (f *Facts) findTableMemory(r *Report) {
	d := f.DDT
	if d == nil || d.Entries == 0 {
		return
	}

	x := Finding{
		Code: "zfs-ddt-memory", Severity: Note,
		Measured: []Figure{
			figure("ddt_entries", "entries", Count, d.Entries),
			ranged("ddt_on_disk", "on disk", Bytes, d.OnDisk),
			ranged("ddt_in_core", "in memory, all of it", Bytes, d.InCore),
		},
		Why: "Every write with dedup, and every free of a block written with it, needs its entry. While the table is in " +
			"memory that costs memory which caches nothing else; what is not in memory is read from the disks, at random, " +
			"before the write can go on.",
	}

	if d.InLog != nil {
		x.Measured = append(x.Measured, figure("ddt_in_log", "entries in its log", Count,
			*d.InLog).noted("not written back yet: these may count twice"))
	}

	if f.Quota != "" {
		x.Measured = append(x.Measured, words("ddt_quota", "dedup_table_quota", f.Quota))
	}

	percent := func(name, label string, of int64) (of100 float64) {
		if of <= 0 {
			x.Measured = append(x.Measured, unknown(name, label, Percent, "this host does not tell"))
			return 0
		}
		x.Measured = append(x.Measured, known(name, label, Percent, 100*float64(d.InCore.Low)/float64(of),
			100*float64(d.InCore.High)/float64(of)))
		return 100 * float64(d.InCore.Mid()) / float64(of)
	}

	percent("ddt_of_memory", "of this host's memory", f.MemoryBytes)
	arc := percent("ddt_of_arc", "of what the ARC may take", f.ARCMaxBytes)
	switch {
	case arc > 100:
		x.Severity, x.Title = Warning, "the dedup table is larger than the ARC may become: writes wait for reads of it"
	case arc >= 25:
		x.Severity, x.Title = Warning, "the dedup table takes a large part of the ARC"
	default:
		x.Title = "the dedup table fits in the ARC"
	}

	r.find(x)
}

func (f *Facts) findUniqueBlocks(r *Report) {
	d := f.DDT
	if d == nil || d.Blocks.Mid() == 0 {
		return
	}

	b := d.Once()
	share := Range{b.Blocks.Low * 1000 / max(d.Blocks.High, 1), b.Blocks.High * 1000 / max(d.Blocks.Low, 1)}
	if share.High == 0 {
		return
	}

	share.High = min(share.High, 1000)
	x := Finding{
		Code: "zfs-ddt-once", Severity: Note,
		Title: "some blocks in the dedup table are referenced once: their entries save nothing",
		Measured: []Figure{
			ranged("ddt_blocks", "blocks in the table", Count, d.Blocks),
			ranged("ddt_once_blocks", "referenced once", Count, b.Blocks),
			known("ddt_once_percent", "of all", Percent, float64(share.Low)/10, float64(share.High)/10),
			ranged("ddt_once_bytes", "they hold", Bytes, b.Allocated),
		},
		Why: "They are pure cost: an entry each, in memory and on disk, for a block that has no duplicate.",
	}

	if share.Mid() >= 500 {
		x.Severity, x.Title = Warning, "most blocks in the dedup table are referenced once: their entries save nothing"
	}

	x.Do = f.prune()
	r.find(x)
}

// prune is how entries of blocks without duplicates are dropped.
func (f *Facts) prune() []Step {
	if f.Features["fast_dedup"] == "active" {
		return []Step{{"drop the entries of blocks that are referenced once; the blocks stay, and a later duplicate of " +
			"them takes space of its own",
			[]string{"zpool ddtprune -p 100 " + word(f.Pool)}}}
	}
	return []Step{{Text: "this table is of the old kind, which `zpool ddtprune` cannot prune: its entries go when " +
		"their blocks are freed"}}
}

func (f *Facts) findSavings(r *Report) {
	d := f.DDT
	if d == nil || d.Entries == 0 {
		return
	}

	saved := d.Saved()
	x := Finding{
		Code: "zfs-dedup-saved", Severity: Note,
		Title: "what dedup saves",
		Measured: []Figure{
			ranged("dedup_saved", "saved on disk", Bytes, saved),
			ranged("dedup_allocated", "blocks in the table take", Bytes, d.Allocated),
		},
		Why: "The saving is what these blocks would take more if each reference had its own. It is bought with the table.",
	}

	if d.Allocated.Low > 0 {
		x.Measured = append(x.Measured, known("dedup_ratio", "ratio of these blocks", Ratio,
			float64(d.Referenced.Low)/float64(d.Allocated.High), float64(d.Referenced.High)/float64(d.Allocated.Low)))
	}

	if saved.Low > 0 {
		const gib = 1 << 30
		x.Measured = append(x.Measured, known("memory_per_gib_saved", "memory for each GiB saved", Bytes,
			gib*float64(d.InCore.Low)/float64(saved.High), gib*float64(d.InCore.High)/float64(saved.Low)))
	} else {
		x.Severity, x.Title = Warning, "dedup saves nothing here"
	}

	r.find(x)
}

// ofSaved is a part of the saved bytes in percent.
func (f *Facts) ofSaved(part Range) (low, high float64) {
	saved := f.DDT.Saved()
	low = 100 * float64(part.Low) / float64(max(saved.High, 1))
	high = 100 * float64(part.High) / float64(max(saved.Low, 1))
	return low, min(high, 100)
}

func (f *Facts) findCopiedTrees(r *Report) {
	c := f.Copies
	if c == nil || f.DDT == nil {
		return
	}

	low, high := f.ofSaved(c.Explained)
	lowIf, highIf := f.ofSaved(c.ExplainedIf)
	copies := 0
	for _, t := range c.Trees {
		copies += len(t.Copies)
	}

	looked := "everything that could be was looked at"
	if !c.Complete {
		looked = "time ran out: --time gives more"
	}

	x := Finding{
		Code: "zfs-dedup-copies", Severity: Note,
		Measured: []Figure{
			figure("copied_trees", "trees that are copies", Count, int64(copies)).noted("same paths, sizes and times"),
			figure("copied_bytes", "files in them that are copies", Bytes, c.CopiedBytes),
		},
		Why: "Copies of a tree or of a volume share every block with their original if they are clones: without a table, " +
			"whatever their number. What is left is duplication that only dedup finds.",
	}

	if c.InsideBytes > 0 {
		x.Measured = append(x.Measured, figure("copied_inside_bytes", "copies in filesystems inside volumes", Bytes,
			c.InsideBytes).noted("dedup shares them only where they lie alike"))
	}

	for _, g := range c.Volumes {
		x.Measured = append(x.Measured, ranged("copied_volume_bytes", "copies in "+strconv.Itoa(len(g.Volumes))+" volumes",
			Bytes, g.Explained).
			noted(fmt.Sprintf("%d of %d blocks at %d places drawn at random; 95 %% confidence", g.Equal, g.Blocks, g.Places)))
	}

	if c.Sampled > 0 {
		x.Measured = append(x.Measured, words("copied_sample", "of these, read and equal",
			fmt.Sprintf("%d of %d blocks drawn at random", c.SampledEqual, c.Sampled)))
	}

	x.Measured = append(x.Measured,
		known("explained_percent", "of what dedup saves, copies are", Percent, low, high).noted(explainedNote(low)))
	if lowIf > low {
		x.Measured = append(x.Measured, known("explained_percent_if", "the same, on a condition", Percent, lowIf, highIf).
			noted("if datasets whose dedup is off now never had it on"))
	}

	x.Measured = append(x.Measured,
		words("looked_at", "looked at", fmt.Sprintf("%d directories, %d files, in %.1f s of %.0f s; %s", c.Directories,
			c.Files, c.TookSeconds, c.LimitSeconds, looked)),
	)
	if len(c.NotLookedAt) > 0 {
		x.Measured = append(x.Measured, words("not_looked_at", "not looked at", strings.Join(c.NotLookedAt, "; ")))
	}

	switch {
	case low >= 50:
		x.Severity, x.Title = Warning, fmt.Sprintf("at least %.0f %% of what dedup saves are copies, which clones would "+
			"share for nothing", low)
	case low >= 1:
		x.Title = fmt.Sprintf("at least %.0f %% of what dedup saves are copies, which clones would share for nothing", low)
	case lowIf >= 1:
		x.Title = fmt.Sprintf("copies were found: %.0f to %.0f %% of what dedup saves, if what has dedup off now never "+
			"had it on", lowIf, highIf)
	case high >= 1:
		x.Title = fmt.Sprintf("copies were found; how much of what dedup saves they are, 0 to %.0f %%, cannot be told", high)
	default:
		x.Title = "no copies were found that clones would share"
	}

	r.find(x)
}

func explainedNote(low float64) string {
	if low > 0 {
		return "the lower bound, with 95 % confidence in what was drawn, holds even if all that has no entry in the table " +
			"belongs to the copies"
	}
	return "no lower bound: as much as was found may have been written without dedup"
}

func (f *Facts) findQuota(r *Report) {
	limit, err := strconv.ParseInt(f.Quota, 10, 64)
	if err != nil || limit <= 0 || f.DDT == nil || f.DDT.OnDisk.High < limit/10*9 {
		return
	}

	r.find(Finding{
		Code: "zfs-ddt-quota", Severity: Warning,
		Title: "the dedup table has reached its quota: new blocks are not deduplicated",
		Measured: []Figure{
			ranged("ddt_on_disk", "on disk", Bytes, f.DDT.OnDisk),
			figure("ddt_quota", "dedup_table_quota", Bytes, limit),
		},
		Why: "New copies take their full size, while the table goes on costing what it does: the pool may run full where " +
			"it did not before.",
		Do: f.prune(),
	})
}

func (f *Facts) findRotatingDisks(r *Report) {
	m := f.Media
	if f.DDT == nil || f.DDT.Entries == 0 || m.Rotating == 0 || len(m.Helpers) > 0 {
		return
	}

	r.find(Finding{
		Code: "zfs-ddt-media", Severity: Warning,
		Title: "the dedup table is on disks that rotate",
		Measured: []Figure{
			figure("rotating_disks", "disks that the kernel says rotate", Count,
				int64(m.Rotating)).noted("virtual disks often say so and do not"),
			figure("solid_disks", "others", Count, int64(m.Solid+m.Unknown)),
		},
		Why: "Entries lie at random places by nature: each that is not in memory costs a seek, and so does each that is " +
			"written back.",
		Do: []Step{{Text: "a mirrored special or dedup vdev on flash would hold the table; it can hardly be taken out " +
			"again. Needing no table is better: see below"}},
	})
}

func (f *Facts) findBlockCloning(r *Report) {
	c := f.Cloning
	if !f.dedups() && c.SavedBytes == 0 {
		return
	}

	x := Finding{Code: "zfs-block-cloning", Severity: Note}
	if !c.Known {
		x.Title = "this OpenZFS has no block cloning: `cp --reflink` copies"
		x.Measured = []Figure{words("bclone_feature", "feature block_cloning", "not there: it came with 2.2")}
		x.Why = "Clones of datasets and volumes need no block cloning, and share on every version."
		r.find(x)
		return
	}

	enabled := map[string]string{"1": "on", "0": "off", "": "no such switch in this version"}[c.Enabled]
	x.Measured = []Figure{
		figure("bclone_used", "bcloneused", Bytes, c.UsedBytes),
		figure("bclone_saved", "bclonesaved", Bytes, c.SavedBytes),
		words("bclone_ratio", "bcloneratio", c.Ratio),
		words("bclone_feature", "feature block_cloning", c.Feature),
		words("bclone_enabled", "zfs_bclone_enabled", enabled),
	}

	x.Title = "`cp --reflink` shares blocks here, within and between filesystems of the pool, but not in volumes"
	if !c.Shares() {
		x.Title = "`cp --reflink` shares nothing here: block cloning is off"
	}

	x.Why = "Blocks that are shared so, need no dedup table. But the sharing is lost in `zfs send`: a stream carries " +
		"every copy in full, and receiving it can need many times the space (as it does for dedup). " +
		"And each file is still copied one by one, with an inode of its own. What is freed or shared counts only when its " +
		"transaction group is written: a loop of copies can fail for want of space that is there (`zpool sync` between " +
		"them)."

	if c.SavedBytes > 0 && c.SavedBytes > f.FreeBytes {
		x.Severity = Warning
		x.Title += "; sent back here, what it saves would not fit"
	}

	r.find(x)
}

// goldens are trees that were copied, with names that pando takes.
func (f *Facts) goldens() (dirs []TreeCopies, names []string) {
	if f.Copies == nil {
		return nil, nil
	}

	taken := map[string]bool{}
	for _, t := range f.Copies.Trees { // the largest first
		if len(dirs) > 0 && t.bytes() < dirs[0].bytes()/20 {
			break // not worth a golden
		}
		name := goldenName(t.Original)
		for base, i := name, 2; taken[name]; i++ {
			name = fmt.Sprintf("%s-%d", base, i)
		}
		taken[name] = true
		dirs, names = append(dirs, t), append(names, name)
		if len(dirs) == 5 {
			break
		}
	}

	return dirs, names
}

// largest is what the largest copy shares with the original.
func (t TreeCopies) largest() (n int64) {
	for _, c := range t.Copies {
		n = max(n, c.CopiedBytes)
	}
	return n
}

// goldenName makes a name of the last part of a path.
func goldenName(path string) string {
	var b strings.Builder
	for _, c := range filepath.Base(path) {
		if c < 0x80 && (strings.ContainsRune("-_.", c) && b.Len() > 0 || ref.CheckName("", string(c)) == nil) {
			b.WriteRune(c)
		}
	}
	name := strings.TrimRight(b.String(), ".-_")
	if len(name) > 100 || ref.CheckName("", name) != nil {
		return "golden"
	}
	return name
}

// word makes s one word of a shell's command.
func word(s string) string {
	for _, c := range s {
		if c >= 0x80 || !strings.ContainsRune("/._-+:@%,=", c) && ref.CheckName("", string(c)) != nil {
			return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
		}
	}
	return s
}

func (f *Facts) findMigration(r *Report) {
	if !f.dedups() || f.DDT == nil {
		return
	}

	x := Finding{
		Code: "zfs-dedup-migrate", Severity: Note,
		Title: "how to do without dedup, in an order in which nothing runs full",
		Measured: []Figure{
			figure("free", "free in the pool", Bytes, f.FreeBytes),
			ranged("returns_memory", "memory that comes back", Bytes,
				f.DDT.InCore).noted("the whole table's, when its last entry is gone"),
			ranged("returns_disk", "space that comes back", Bytes,
				f.DDT.OnDisk).noted("the whole table's; the data takes what it takes now, as clones share what dedup did"),
		},
		Why: "Dedup hides that the copies do not fit. So clones come first, then no new copies, then dedup goes off, and " +
			"the old copies last.",
	}

	dirs, names := f.goldens()
	if len(dirs) > 0 {
		var room int64
		for _, t := range dirs {
			room += t.largest()
		}
		x.Measured = append(x.Measured, figure("import_room", "one copy of each tree takes", Bytes,
			room).noted("at least: what was found of it in its largest copy"))
		if room > f.FreeBytes {
			x.Severity = Warning
			x.Title = "how to do without dedup; there is not room enough for that yet"
		}
	}

	step := func(text string, commands ...string) { x.Do = append(x.Do, Step{text, commands}) }
	var off []string
	for _, d := range f.Datasets {
		if d.From == "local" || d.From == "received" || d.From == "default" {
			off = append(off, "zfs set dedup=off "+word(d.Name))
		}
	}

	if len(f.Datasets) > 0 && f.DDT.Entries == 0 {
		x.Title = "how to do without dedup: turn it off"
		step("turn it off: there are no copies yet that need it", off...)
		r.find(x)
		return
	}

	if len(f.Datasets) > 0 {
		var imports, clones []string
		for i, t := range dirs {
			imports = append(imports, fmt.Sprintf("pando golden import %s %s --adopt", names[i], word(t.Original)))
			clones = append(clones, fmt.Sprintf("pando clone %s JOB --mount", names[i]))
		}

		if len(dirs) == 0 {
			imports, clones = []string{"pando golden import NAME DIR --adopt"}, []string{"pando clone NAME JOB --mount"}
		}

		step("make a pool of Pando's beside what is there; its datasets have dedup off",
			"pando init --driver zfs --zfs-dataset "+word(f.Pool+"/pando"))
		text := "import what is copied, each tree once. This takes the size of one copy (not of all): it must be free. " +
			"What runs on the old copies goes on"
		if f.Copies != nil && slices.ContainsFunc(f.Copies.Volumes, func(g VolumeGroup) bool { return g.Equal > 0 }) {
			text += ". Of volumes that are copies of each other, import one: the directory where it is mounted"
		}

		step(text, imports...)
		step("give out clones where copies were made (JOB is a name of yours)", clones...)
		step("when nothing copies any more, turn dedup off. Earlier, new copies would take their full size. This does not "+
			"shrink the table: it stops its growth. Blocks there stay shared until they are overwritten", off...)
	}

	warm := []string{}
	if _, ok := f.Features["fast_dedup"]; ok { // the same version brought it
		warm = append(warm, "zpool prefetch -t ddt "+word(f.Pool))
	}

	step("delete old copies, oldest first, some at a time, and their snapshots: each block that is freed needs its "+
		"entry, so this is slow if the table is not in memory. The space of a block comes back with its last copy, not before",
		append(warm, "rm -r --one-file-system COPY", "zpool wait -t free "+word(f.Pool), "zpool sync "+word(f.Pool))...)
	watch := []string{"zpool status -D " + word(f.Pool)}
	text := "watch the table shrink"
	if f.Features["fast_dedup"] == "active" {
		text += "; drop the entries of blocks of which one copy is left"
		watch = append(watch, "zpool ddtprune -p 100 "+word(f.Pool))
	} else {
		text += "; entries of blocks of which one copy is left stay until that is gone, too"
	}

	step(text, watch...)
	r.find(x)
}
