package doctor

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/ref"
)

// report returns the findings that follow from the facts.
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

// dedups reports whether the pool uses dedup, or may use it.
func (f *Facts) dedups() bool {
	return len(f.Datasets) > 0 || f.DDT == nil || f.DDT.Entries > 0
}

// summary says in one sentence whether the pool uses dedup.
func (f *Facts) summary() string {
	switch {
	case f.DDT == nil:
		return "dedup: the figures of the dedup table are unknown"
	case !f.dedups():
		return "no dataset uses dedup and there is no dedup table: dedup costs nothing here"
	case f.DDT.Entries == 0:
		return "dedup is on, but nothing has been written with it yet: now is the best time to turn it off"
	case len(f.Datasets) == 0:
		return "dedup is off, but blocks written with it remain, and so does their table"
	}
	return "dedup is on; its cost and savings are listed below"
}

const unknownDDT = "the figures of the dedup table are unknown"

// findUnknownTable reports a dedup table whose figures could not be read.
func (f *Facts) findUnknownTable(r *Report) {
	if f.DDT != nil {
		return
	}
	r.find(Finding{
		Code: "zfs-ddt-unknown", Severity: Warning,
		Title:    unknownDDT,
		Measured: []Figure{unknown("ddt_entries", "entries", Count, f.DDTUnknown)},
		Why:      "The cost and the savings of the table cannot be computed. No figure below is a guess.",
		Do: []Step{step("inspect the table yourself, and report the output as a bug in pando",
			"zpool status -D "+word(f.Pool))},
	})
}

// findDedupDatasets reports the datasets with dedup on.
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
			count("dedup_datasets", "datasets with dedup", len(f.Datasets)),
			figure("dedup_referenced", "they reference", Bytes, referenced).noted("each counted in full"),
			figure("dedup_logical", "uncompressed", Bytes, logical),
		},
		Why: "ZFS looks up every block written there in the dedup table, and adds an entry for each new one. Other " +
			"datasets are not affected.",
	})
}

// findTableMemory reports the size of the dedup table, compared with the host's memory and the ARC.
func (f *Facts) findTableMemory(r *Report) {
	d := f.DDT
	if d == nil || d.Entries == 0 {
		return
	}

	x := Finding{
		Code: "zfs-ddt-memory", Severity: Note,
		Measured: []Figure{
			count("ddt_entries", "entries", d.Entries),
			ranged("ddt_on_disk", "on disk", Bytes, d.OnDisk),
			ranged("ddt_in_core", "in memory, all of it", Bytes, d.InCore),
		},
		Why: "Every write with dedup, and every free of a block written with it, needs its entry. Entries in memory take " +
			"room from other caches; entries that are not in memory are read from the disks, at random places, before the " +
			"write can continue.",
	}

	if d.InLog != nil {
		x.measure(count("ddt_in_log", "entries in its log", *d.InLog).noted("not written back yet: these may count twice"))
	}

	if f.Quota != "" {
		x.measure(words("ddt_quota", "dedup_table_quota", f.Quota))
	}

	// Compare it with the memory that it needs.
	percent := func(name, label string, of int64) (of100 float64) {
		if of <= 0 {
			x.measure(unknown(name, label, Percent, "this host does not tell"))
			return 0
		}
		x.measure(known(name, label, Percent, 100*float64(d.InCore.Low)/float64(of),
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

// findUniqueBlocks reports entries of blocks with one reference, which save nothing.
func (f *Facts) findUniqueBlocks(r *Report) {
	d := f.DDT
	if d == nil || d.Blocks.Mid() == 0 {
		return
	}

	// The share is in tenths of a percent.
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
		Why: "They are pure cost: each has an entry, in memory and on disk, for a block without duplicates.",
	}

	if share.Mid() >= 500 {
		x.Severity, x.Title = Warning, "most blocks in the dedup table are referenced once: their entries save nothing"
	}

	x.Do = f.prune()
	r.find(x)
}

// prune returns the step that drops the entries of blocks without duplicates, if this table can be pruned.
func (f *Facts) prune() []Step {
	if f.Features["fast_dedup"] == "active" {
		return []Step{step("drop the entries of blocks that are referenced once. The blocks stay, and later duplicates of "+
			"them take space of their own",
			"zpool ddtprune -p 100 "+word(f.Pool))}
	}
	return []Step{{Text: "this table has the old format, which `zpool ddtprune` cannot prune: entries disappear when " +
		"their blocks are freed"}}
}

// findSavings reports the space that dedup saves, and the memory it costs.
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
		Why: "The saving is the additional space that these blocks would take if each reference had its own. The table is " +
			"its price.",
	}

	if d.Allocated.Low > 0 {
		x.measure(known("dedup_ratio", "ratio of these blocks", Ratio,
			float64(d.Referenced.Low)/float64(d.Allocated.High), float64(d.Referenced.High)/float64(d.Allocated.Low)))
	}

	// Relate the memory to the savings.
	if saved.Low > 0 {
		const gib = 1 << 30
		x.measure(known("memory_per_gib_saved", "memory for each GiB saved", Bytes,
			gib*float64(d.InCore.Low)/float64(saved.High), gib*float64(d.InCore.High)/float64(saved.Low)))
	} else {
		x.Severity, x.Title = Warning, "dedup saves nothing here"
	}

	r.find(x)
}

// ofSaved returns a part of the saved bytes in percent, as bounds.
func (f *Facts) ofSaved(part Range) (low, high float64) {
	saved := f.DDT.Saved()
	low = 100 * float64(part.Low) / float64(max(saved.High, 1))
	high = 100 * float64(part.High) / float64(max(saved.Low, 1))
	return low, min(high, 100)
}

// findCopiedTrees reports how much of what dedup saves are copies, which clones would share without a table.
func (f *Facts) findCopiedTrees(r *Report) {
	c := f.Copies
	if c == nil || f.DDT == nil {
		return
	}

	low, high := f.ofSaved(c.Explained)
	lowIf, highIf := f.ofSaved(c.ExplainedIf)
	x := Finding{
		Code: "zfs-dedup-copies", Severity: Note,
		Measured: c.figures(),
		Why: "Clones of a tree or a volume share every block with their original, without a table, however many there " +
			"are. The rest is duplication that only dedup finds.",
	}

	// What they explain.
	x.measure(known("explained_percent", "share of copies in the savings of dedup", Percent, low, high).
		noted(explainedNote(low)))
	if lowIf > low {
		x.measure(known("explained_percent_if", "the same, on one condition", Percent, lowIf, highIf).
			noted("if datasets with dedup off never had it on"))
	}

	// What was examined.
	looked := "everything accessible was examined"
	if !c.Complete {
		looked = "time ran out: allow more with --time"
	}

	x.measure(words("looked_at", "looked at", fmt.Sprintf("%d directories, %d files, in %.1f s of %.0f s; %s",
		c.Directories, c.Files, c.TookSeconds, c.LimitSeconds, looked)),
	)
	if len(c.NotLookedAt) > 0 {
		x.measure(words("not_looked_at", "not looked at", strings.Join(c.NotLookedAt, "; ")))
	}

	switch {
	case low >= 50:
		x.Severity, x.Title = Warning, fmt.Sprintf("at least %.0f %% of what dedup saves are copies, which clones would "+
			"share at no cost", low)
	case low >= 1:
		x.Title = fmt.Sprintf("at least %.0f %% of what dedup saves are copies, which clones would share at no cost", low)
	case lowIf >= 1:
		x.Title = fmt.Sprintf("copies were found: %.0f to %.0f %% of what dedup saves, if datasets with dedup off never "+
			"had it on", lowIf, highIf)
	case high >= 1:
		x.Title = fmt.Sprintf("copies were found; they are between 0 and %.0f %% of what dedup saves", high)
	default:
		x.Title = "no copies were found that clones would share"
	}

	r.find(x)
}

// figures returns the copies that were found.
func (c *Copies) figures() []Figure {
	copies := 0
	for _, t := range c.Trees {
		copies += len(t.Copies)
	}

	out := []Figure{
		count("copied_trees", "trees that are copies", copies).noted("same paths, sizes and times"),
		figure("copied_bytes", "files in them that are copies", Bytes, c.CopiedBytes),
	}

	if c.InsideBytes > 0 {
		out = append(out, figure("copied_inside_bytes", "copies in filesystems inside volumes", Bytes,
			c.InsideBytes).noted("dedup shares them only if their blocks are aligned alike"))
	}

	for _, g := range c.Volumes {
		out = append(out, ranged("copied_volume_bytes", "copies in "+strconv.Itoa(len(g.Volumes))+" volumes",
			Bytes, g.Explained).
			noted(fmt.Sprintf("%d of %d blocks at %d places drawn at random; 95 %% confidence", g.Equal, g.Blocks, g.Places)))
	}

	if c.Sampled > 0 {
		out = append(out, words("copied_sample", "of these, read and equal",
			fmt.Sprintf("%d of %d blocks drawn at random", c.SampledEqual, c.Sampled)))
	}

	return out
}

// explainedNote returns the note on the share that copies explain, given its lower bound.
func explainedNote(low float64) string {
	if low > 0 {
		return "the lower bound, at 95 % confidence, holds even if all blocks without an entry in the table belong to the " +
			"copies"
	}
	return "no lower bound: all copies found may have been written without dedup"
}

// findQuota reports a dedup table that has reached 90 % of its quota.
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
		Why: "New copies take their full size, while the table costs as much as before: the pool can fill up.",
		Do:  f.prune(),
	})
}

// findRotatingDisks reports a dedup table on rotating disks.
func (f *Facts) findRotatingDisks(r *Report) {
	m := f.Media
	if f.DDT == nil || f.DDT.Entries == 0 || m.Rotating == 0 || len(m.Helpers) > 0 {
		return
	}

	r.find(Finding{
		Code: "zfs-ddt-media", Severity: Warning,
		Title: "the dedup table is on rotating disks",
		Measured: []Figure{
			count("rotating_disks", "disks the kernel reports as rotating", m.Rotating).noted("often wrong for virtual disks"),
			count("solid_disks", "other disks", m.Solid+m.Unknown),
		},
		Why: "Entries are at random places: each one that is read from disk, or written back, costs a seek.",
		Do: []Step{{Text: "put the table on a mirrored special or dedup vdev on flash, which is hard to remove again. It " +
			"is better to need no table: see below"}},
	})
}

// findBlockCloning reports whether block cloning can replace dedup here.
func (f *Facts) findBlockCloning(r *Report) {
	c := f.Cloning
	if !f.dedups() && c.SavedBytes == 0 {
		return
	}

	x := Finding{Code: "zfs-block-cloning", Severity: Note}
	if !c.Known {
		x.Title = "this version of OpenZFS has no block cloning: `cp --reflink` copies the data"
		x.Measured = []Figure{words("bclone_feature", "feature block_cloning", "missing: it came with OpenZFS 2.2")}
		x.Why = "Clones of datasets and volumes need no block cloning, and share blocks in every version."
		r.find(x)
		return
	}

	// Measure.
	enabled := map[string]string{"1": "on", "0": "off", "": "no such switch in this version"}[c.Enabled]
	x.Measured = []Figure{
		figure("bclone_used", "bcloneused", Bytes, c.UsedBytes),
		figure("bclone_saved", "bclonesaved", Bytes, c.SavedBytes),
		words("bclone_ratio", "bcloneratio", c.Ratio),
		words("bclone_feature", "feature block_cloning", c.Feature),
		words("bclone_enabled", "zfs_bclone_enabled", enabled),
	}

	// Judge.
	x.Title = "`cp --reflink` shares blocks within and between filesystems of this pool, but not in volumes"
	if !c.Shares() {
		x.Title = "`cp --reflink` shares no blocks here: block cloning is off"
	}

	x.Why = "Blocks shared this way need no dedup table. But `zfs send` loses the sharing: a stream carries every copy " +
		"in full, and receiving it can need many times the space (as with dedup). Files are still copied one by one, each " +
		"with its own inode. Freed and shared space counts only after its transaction group is written: a loop of copies " +
		"can run out of space that is about to be freed (run `zpool sync` between them)."

	if c.SavedBytes > 0 && c.SavedBytes > f.FreeBytes {
		x.Severity = Warning
		x.Title += "; if sent and received here again, the data would not fit"
	}

	r.find(x)
}

// goldens returns the trees to import as goldens, at most five, and a valid name for each.
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

// largest returns the bytes that the largest copy shares with the original.
func (t TreeCopies) largest() (n int64) {
	for _, c := range t.Copies {
		n = max(n, c.CopiedBytes)
	}
	return n
}

// goldenName makes a valid name of a golden from the last part of a path.
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

// word quotes s, if necessary, as one word of a shell command.
func word(s string) string {
	for _, c := range s {
		if c >= 0x80 || !strings.ContainsRune("/._-+:@%,=", c) && ref.CheckName("", string(c)) != nil {
			return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
		}
	}
	return s
}

// findMigration reports how to replace dedup by clones.
func (f *Facts) findMigration(r *Report) {
	if !f.dedups() || f.DDT == nil {
		return
	}

	x := Finding{
		Code: "zfs-dedup-migrate", Severity: Note,
		Title: "how to stop using dedup, in an order that never fills the pool",
		Measured: []Figure{
			figure("free", "free in the pool", Bytes, f.FreeBytes),
			ranged("returns_memory", "memory regained", Bytes,
				f.DDT.InCore).noted("the whole table, once its last entry is gone"),
			ranged("returns_disk", "space regained", Bytes,
				f.DDT.OnDisk).noted("the whole table; the data takes as much as now, because clones share what dedup shared"),
		},
		Why: "Without dedup the copies do not fit. So make clones first, then no more copies, then turn dedup off, and " +
			"delete the old copies last.",
	}

	// The room for the imports.
	dirs, names := f.goldens()
	if len(dirs) > 0 {
		var room int64
		for _, t := range dirs {
			room += t.largest()
		}
		x.measure(figure("import_room", "one copy of each tree takes", Bytes,
			room).noted("at least: the part found in its largest copy"))
		if room > f.FreeBytes {
			x.Severity = Warning
			x.Title = "how to stop using dedup; the pool has too little free space for it yet"
		}
	}

	// The steps.
	switch {
	case len(f.Datasets) > 0 && f.DDT.Entries == 0:
		x.Title = "how to stop using dedup: turn it off"
		x.Do = []Step{step("turn it off: no copies need it yet", f.dedupOff()...)}
	case len(f.Datasets) > 0:
		x.Do = append(f.cloneSteps(dirs, names), f.shrinkSteps()...)
	default:
		x.Do = f.shrinkSteps()
	}

	r.find(x)
}

// dedupOff returns the commands that turn dedup off where it was turned on.
func (f *Facts) dedupOff() (commands []string) {
	for _, d := range f.Datasets {
		if d.From == "local" || d.From == "received" || d.From == "default" {
			commands = append(commands, "zfs set dedup=off "+word(d.Name))
		}
	}
	return commands
}

// cloneSteps returns the steps that replace new copies by clones, and then turn dedup off. dirs are the trees to
// import, names the goldens they become.
func (f *Facts) cloneSteps(dirs []TreeCopies, names []string) []Step {
	imports, clones := []string{"pando golden import NAME DIR --adopt"}, []string{"pando clone NAME JOB --mount"}
	if len(dirs) > 0 {
		imports, clones = nil, nil
	}

	for i, t := range dirs {
		imports = append(imports, fmt.Sprintf("pando golden import %s %s --adopt", names[i], word(t.Original)))
		clones = append(clones, fmt.Sprintf("pando clone %s JOB --mount", names[i]))
	}

	text := "import each copied tree once. This needs free space for one copy, not for all. Programs that use the old " +
		"copies keep running"
	if f.Copies != nil && slices.ContainsFunc(f.Copies.Volumes, func(g VolumeGroup) bool { return g.Equal > 0 }) {
		text += ". If volumes are copies of each other, import one: the directory it is mounted on"
	}

	return []Step{
		step("create a Pando pool beside the existing datasets; its own datasets have dedup off",
			"pando init --driver zfs --zfs-dataset "+word(f.Pool+"/pando")),
		step(text, imports...),
		step("hand out clones where copies were made before (choose a name for JOB)", clones...),
		step("when nothing makes copies any more, turn dedup off. Before that, new copies would take their full size. The "+
			"table does not shrink, but stops growing. Its blocks stay shared until they are overwritten", f.dedupOff()...),
	}
}

// shrinkSteps returns the steps that delete the old copies, and with them the entries of the dedup table.
func (f *Facts) shrinkSteps() []Step {
	pool := word(f.Pool)
	remove := []string{"rm -r --one-file-system COPY", "zpool wait -t free " + pool, "zpool sync " + pool}
	if _, ok := f.Features["fast_dedup"]; ok { // the same version introduced prefetching
		remove = append([]string{"zpool prefetch -t ddt " + pool}, remove...)
	}

	text, watch := "watch the table shrink", []string{"zpool status -D " + pool}
	if f.Features["fast_dedup"] == "active" {
		text += "; drop the entries of blocks with only one copy left"
		watch = append(watch, "zpool ddtprune -p 100 "+pool)
	} else {
		text += "; entries of blocks with only one copy left stay until that copy is gone"
	}

	return []Step{
		step("delete old copies and their snapshots, oldest first, a few at a time: each freed block needs its entry, so "+
			"this is slow if the table is not in memory. The space of a block is freed with its last copy", remove...),
		step(text, watch...),
	}
}
