package syncbench

import (
	"slices"
	"strings"

	"pando/internal/base/errs"
)

// Orders of the writes of a writer.
const (
	// Sequential: each write begins where the one before it has ended; at the end of the
	// writer's file (or of its part of a shared file) it goes on at the start of
	// its next file, and after the last one at that of its first again.
	Sequential = "sequential"
	// Random: any block of the file, each once before any comes again.
	Random = "random"
)

// Calls says which system calls each writer of a profile makes, over and over, while
// it is measured, and no others that write or sync. Tests compare it with what strace shows.
type Calls struct {
	Write   string  `json:"write"`           // "pwrite64" or "write"
	Sizes   []int64 `json:"write_bytes"`     // every write has one of these
	Order   string  `json:"order"`           // Sequential or Random
	First   int64   `json:"first_offset"`    // of a file's first write
	Sync    string  `json:"sync,omitempty"`  // "fdatasync", "fsync"; "": the write itself waits
	PerSync int     `json:"writes_per_sync"` // writes before each sync, of this writer; 1 too if the write itself waits
	// Again: each time that a writer comes round to its first file, it syncs it once more before it
	// writes to it: fio has no way not to, with several files.
	Again     bool     `json:"sync_again,omitempty"`
	OpenFlags []string `json:"open_flags"` // of openat, besides O_RDWR and O_CREAT
	Shared    bool     `json:"shared"`     // all writers have one file, each a part of it
	// Unwritten: a writer finds every file allocated and never written (fallocate), or, where
	// the filesystem cannot, a hole. Otherwise all bytes were written before.
	Unwritten bool `json:"unwritten"`
}

// definition is a profile and how its files are laid out.
type definition struct {
	Profile
	file    string   // fio's option for the names of its files
	engine  string   // fio's ioengine
	options []string // fio's, that make the pattern

	segmentBytes int64 // of a file, if size and writers allow
	minSegment   int64 // below this the pattern would be another one
	minSegments  int   // of each writer, at the least
	defaultBytes int64 // of all files; 0: segmentBytes for each writer
	head         int64 // bytes before the first write of a file
}

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
	gib = int64(1) << 30

	pageBytes       = 8 * kib          // of PostgreSQL, in its log and in its tables
	pgSegmentBytes  = 16 * mib         // wal_segment_size
	pgLogBytes      = 1 * gib          // max_wal_size
	redoBytes       = 100 * mib        // innodb_redo_log_capacity
	redoBlock       = 512              // OS_FILE_LOG_BLOCK_SIZE
	frameBytes      = 24 + 4096        // of SQLite's log: header and page
	framesPerWAL    = 1000             // wal_autocheckpoint
	walHeaderBytes  = 32               // of SQLite's log
	etcdSegment     = 64 * 1000 * 1000 // SegmentSizeBytes
	etcdRecord      = 2300
	checkpointPages = 4096
)

// definitions are all profiles, those of logs first.
var definitions = []definition{
	{
		Profile: Profile{
			Name:  "postgres",
			Title: "PostgreSQL: commits, wal_sync_method = fdatasync",
			Models: "PostgreSQL writes its log (WAL) in pages of 8 KiB with pwrite and makes a commit durable with " +
				"fdatasync, its default on Linux" +
				" (xlog.c: XLogWrite, issue_xlog_fsync; postgresql.org/docs/current/runtime-config-wal.html, wal_sync_method)." +
				" The log is in files of 16 MiB that are written with zeros before their first use (wal_init_zero) and renamed " +
				"for use again afterwards (wal_recycle)," +
				" up to max_wal_size, 1 GiB: so a commit overwrites blocks that exist, and no metadata has to be written with it." +
				" Here: 64 files of 16 MiB, written before the run, overwritten one after the other in writes of 8 KiB, an " +
				"fdatasync after each (and one more each time that fio comes round to the first file)." +
				" Unlike here, a small commit writes the page that the last one wrote once more, and a big one writes many " +
				"pages before its sync." +
				" PostgreSQL lets one process at a time write its log (WALWriteLock); more than one writer here is more than " +
				"one server.",
			Sync: "fdatasync", Writers: 1, Bytes: pageBytes, PerSync: 1,
			Calls: Calls{Write: "pwrite64", Sizes: []int64{pageBytes}, Order: Sequential, Sync: "fdatasync", PerSync: 1,
				Again: true},
		},
		file: "--filename_format=log.$jobnum.$filenum", engine: "psync",
		options:      []string{"--file_service_type=sequential", "--rw=write", "--bs=8192", "--fdatasync=1", "--overwrite=1"},
		segmentBytes: pgSegmentBytes, minSegment: 64 * kib, minSegments: 2, defaultBytes: pgLogBytes,
	},
	{
		Profile: Profile{
			Name:  "postgres-dsync",
			Title: "PostgreSQL: commits, wal_sync_method = open_datasync",
			Models: "With wal_sync_method = open_datasync PostgreSQL opens its log with O_DSYNC and makes no other call: " +
				"each pwrite returns when its data is durable" +
				" (xlog.c: get_sync_bit; postgresql.org/docs/current/runtime-config-wal.html). The kernel may send each as one " +
				"forced write (FUA) instead of a write and a flush." +
				" The files are those of the profile postgres: 64 of 16 MiB, written before the run and overwritten in writes " +
				"of 8 KiB." +
				" Without O_DIRECT, as PostgreSQL does by default (debug_io_direct).",
			Sync: "write (O_DSYNC)", Writers: 1, Bytes: pageBytes, PerSync: 1,
			Calls: Calls{Write: "pwrite64", Sizes: []int64{pageBytes}, Order: Sequential, PerSync: 1,
				OpenFlags: []string{"O_DSYNC"}},
		},
		file: "--filename_format=log.$jobnum.$filenum", engine: "psync",
		options:      []string{"--file_service_type=sequential", "--rw=write", "--bs=8192", "--sync=dsync", "--overwrite=1"},
		segmentBytes: pgSegmentBytes, minSegment: 64 * kib, minSegments: 2, defaultBytes: pgLogBytes,
	},
	{
		Profile: Profile{
			Name:  "innodb",
			Title: "MySQL, MariaDB: InnoDB commits of several sessions, innodb_flush_log_at_trx_commit = 1",
			Models: "InnoDB writes its redo log in blocks of 512 bytes with pwrite, through the page cache whatever " +
				"innodb_flush_method says, and makes commits durable with fsync" +
				" (log0write.cc; dev.mysql.com/doc/refman/8.0/en/innodb-parameters.html: innodb_flush_log_at_trx_commit, " +
				"innodb_flush_method; fdatasync with innodb_use_fdatasync, the default since 8.4)." +
				" The log is 100 MiB that are overwritten in circle (innodb_redo_log_capacity). Commits of several sessions " +
				"share an fsync (group commit)." +
				" Here: 4 writers in one file of 100 MiB, written before the run, each overwriting its quarter in writes of 1, " +
				"2, 4 or 8 blocks (40, 30, 20 and 10 % of the writes), with an fsync after each;" +
				" which of their fsyncs are done by one commit of the filesystem's journal and one flush is up to kernel and " +
				"filesystem." +
				" Unlike here, InnoDB groups in the server: MySQL 8 has one thread that writes and one that syncs for all " +
				"sessions, and the log is 32 files of 3.1 MiB.",
			Sync: "fsync", Writers: 4, PerSync: 1,
			Calls: Calls{Write: "pwrite64", Sizes: []int64{redoBlock, 2 * redoBlock, 4 * redoBlock, 8 * redoBlock},
				Order: Sequential, Sync: "fsync", PerSync: 1, Shared: true},
		},
		file: "--filename=redo", engine: "psync",
		options:      []string{"--rw=write", "--bssplit=512/40:1024/30:2048/20:4096/10", "--fsync=1", "--overwrite=1"},
		segmentBytes: redoBytes, minSegment: 64 * kib, minSegments: 1, defaultBytes: redoBytes,
	},
	{
		Profile: Profile{
			Name:  "sqlite-full",
			Title: "SQLite: commits, journal_mode = WAL, synchronous = FULL",
			Models: "SQLite appends each changed page to its log as a frame, 24 bytes of header and 4096 of page, and with " +
				"synchronous = FULL syncs the log at each commit" +
				" (wal.c: walWriteOneFrame, sqlite3WalFrames; sqlite.org/pragma.html#pragma_synchronous), by fdatasync where it " +
				"was built with HAVE_FDATASYNC, as distributions do, else by fsync (os_unix.c: full_fsync)." +
				" After 1000 frames (wal_autocheckpoint) the log is copied into the database and begins anew at its start: the " +
				"same 4 MiB are overwritten in circle." +
				" Here: one file with a header of 32 bytes and 1000 frames, written before the run, overwritten frame by frame, " +
				"an fdatasync after each: commits that change one page." +
				" Unlike here, SQLite writes header and page with two calls, and every 1000 frames its checkpoint writes and " +
				"syncs the database." +
				" More than one writer here is more than one database.",
			Sync: "fdatasync", Writers: 1, Bytes: frameBytes, PerSync: 1,
			Calls: Calls{Write: "pwrite64", Sizes: []int64{frameBytes}, Order: Sequential, First: walHeaderBytes,
				Sync: "fdatasync", PerSync: 1},
		},
		file: "--filename_format=wal.$jobnum", engine: "psync",
		options:      []string{"--rw=write", "--bs=4120", "--fdatasync=1", "--overwrite=1"},
		segmentBytes: walHeaderBytes + framesPerWAL*frameBytes, minSegment: walHeaderBytes + 100*frameBytes, minSegments: 1,
		head: walHeaderBytes,
	},
	{
		Profile: Profile{
			Name:  "sqlite-normal",
			Title: "SQLite: checkpoints of the log, journal_mode = WAL, synchronous = NORMAL",
			Models: "With synchronous = NORMAL SQLite syncs its log only before a checkpoint, every 1000 frames (wal.c: " +
				"sqlite3WalCheckpoint; sqlite.org/pragma.html#pragma_synchronous, wal_autocheckpoint):" +
				" commits in between are not durable when they return." +
				" Here: the file and the writes of the profile sqlite-full, an fdatasync after every 1000 frames. The latency " +
				"is that of these syncs, one for each 4 MiB, not that of commits, which only write memory." +
				" Unlike here, the checkpoint then writes the pages to the database and syncs that, too.",
			Sync: "fdatasync", Writers: 1, Bytes: frameBytes, PerSync: framesPerWAL,
			Calls: Calls{Write: "pwrite64", Sizes: []int64{frameBytes}, Order: Sequential, First: walHeaderBytes,
				Sync: "fdatasync", PerSync: framesPerWAL},
		},
		file: "--filename_format=wal.$jobnum", engine: "psync",
		options:      []string{"--rw=write", "--bs=4120", "--fdatasync=1000", "--overwrite=1"},
		segmentBytes: walHeaderBytes + framesPerWAL*frameBytes, minSegment: walHeaderBytes + 100*frameBytes, minSegments: 1,
		head: walHeaderBytes,
	},
	{
		Profile: Profile{
			Name:  "etcd",
			Title: "etcd: proposals written to the log",
			Models: "etcd appends records to its log with write and makes them durable with fdatasync before it answers " +
				"(server/storage/wal/wal.go: sync)." +
				" Files of the log are 64,000,000 bytes (SegmentSizeBytes), allocated by fallocate while the one before is " +
				"filled (file_pipeline.go), never written before and never used again:" +
				" so a sync must also write metadata, that a part of the file is now written, and costs more than PostgreSQL's." +
				" Records of some 2,300 bytes, with an fdatasync each, are what disks are usually tested with for etcd (IBM " +
				"2019, \"Using fio to tell whether your storage is fast enough for etcd\": --ioengine=sync --fdatasync=1 " +
				"--bs=2300)." +
				" Here: 8 such files (3 for each writer, if there are more than 2), one after the other in writes of 2,300 " +
				"bytes, an fdatasync after each." +
				" As soon as fio has left a file, Pando truncates it to nothing and allocates it anew, in the background as " +
				"etcd does, so that fio never overwrites." +
				" Unlike here, etcd makes the new file under a temporary name, renames it and syncs the directory. More than " +
				"one writer here is more than one etcd.",
			Sync: "fdatasync", Writers: 1, Bytes: etcdRecord, PerSync: 1,
			Calls: Calls{Write: "write", Sizes: []int64{etcdRecord}, Order: Sequential, Sync: "fdatasync", PerSync: 1,
				Again: true, Unwritten: true},
		},
		file: "--filename_format=log.$jobnum.$filenum", engine: "sync",
		options: []string{"--file_service_type=sequential", "--rw=write", "--bs=2300", "--fdatasync=1",
			"--fallocate=native"},
		segmentBytes: etcdSegment, minSegment: 16 * 1000 * 1000, minSegments: 3, defaultBytes: 8 * etcdSegment,
	},
	{
		Profile: Profile{
			Name:  "checkpoint",
			Title: "Data files: a checkpoint of PostgreSQL, no log",
			Models: "A checkpoint writes all changed pages of 8 KiB from the database's memory to its files, each in its " +
				"place, then syncs each file with fsync" +
				" (bufmgr.c: BufferSync; sync.c: ProcessSyncRequests; postgresql.org/docs/current/wal-configuration.html). A " +
				"table is in files of 1 GiB (RELSEG_SIZE)." +
				" Here: one file of 1 GiB, written before the run; 4096 random pages (32 MiB) are written and then an fsync, " +
				"over and over." +
				" The latency is that of the fsync, which has to write back what the kernel has not yet; commits do not wait " +
				"for it, but share the disk with it." +
				" Unlike here, PostgreSQL writes the pages in the order of the file, spreads them over the time until the next " +
				"checkpoint (checkpoint_completion_target)" +
				" and asks the kernel to begin to write back every 32 pages (checkpoint_flush_after; fio would count these " +
				"calls as syncs). This is what one without these looks like: the burst of a whole checkpoint.",
			Sync: "fsync", Writers: 1, Bytes: pageBytes, PerSync: checkpointPages,
			Calls: Calls{Write: "pwrite64", Sizes: []int64{pageBytes}, Order: Random, Sync: "fsync", PerSync: checkpointPages},
		},
		file: "--filename_format=table.$jobnum", engine: "psync",
		options:      []string{"--rw=randwrite", "--bs=8192", "--fsync=4096", "--overwrite=1"},
		segmentBytes: gib, minSegment: 4 * mib, minSegments: 1, defaultBytes: gib,
	},
}

// Profiles lists what can be measured, as it is when nothing is asked for otherwise; File,
// of all files, is what has to be free. Command is missing: Measure fills it in.
func Profiles() []Profile {
	var out []Profile
	for _, d := range definitions {
		p := d.Profile
		p.File = d.total(0, p.Writers)
		out = append(out, p)
	}
	return out
}

// define finds a profile. Invalid if there is none of that name.
func define(name string) (definition, error) {
	i := slices.IndexFunc(definitions, func(d definition) bool { return d.Name == name })
	if i >= 0 {
		return definitions[i], nil
	}

	e := errs.New(errs.Invalid, op, name, "unknown profile")
	names := ""
	for i, d := range definitions {
		if i > 0 {
			names += ", "
		}
		names += d.Name
	}

	return definition{}, e.WithHint("use one of: %s", names)
}

// CheckProfile returns an error if no profile has this name, with a hint at what was meant. Invalid.
func CheckProfile(op, name string) error {
	for _, p := range Profiles() {
		if p.Name == name {
			return nil
		}
	}
	return errs.New(errs.Invalid, op, name, "unknown profile").WithHint("%s", suggestProfile(name))
}

// EphemeralIs says why nothing in an ephemeral volume is durable: see Config.NotDurable.
func EphemeralIs(volume string) string {
	return volume + " is an ephemeral volume: a reboot removes it, so its syncs buy nothing"
}

// suggestProfile is a hint for a name that is none.
func suggestProfile(name string) string {
	var names []string
	best := ""
	for _, p := range Profiles() {
		names = append(names, p.Name)
		if best == "" && name != "" && (strings.HasPrefix(p.Name, strings.ToLower(name)) ||
			strings.HasPrefix(strings.ToLower(name), p.Name)) {
			best = p.Name
		}
	}

	hint := "the profiles are " + strings.Join(names, ", ") + "; run `pando bench sync --list` to describe them"
	for _, alias := range [][2]string{{"mysql", "innodb"}, {"maria", "innodb"}, {"pg", "postgres"}, {"psql", "postgres"},
		{"sqlite", "sqlite-full"}} {
		if best == "" && strings.HasPrefix(strings.ToLower(name), alias[0]) {
			best = alias[1]
		}
	}

	if best != "" {
		return "did you mean " + best + "? " + strings.ToUpper(hint[:1]) + hint[1:]
	}

	return hint
}
