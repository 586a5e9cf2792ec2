package zfs

import (
	"errors"
	"os"
	"os/user"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
)

// Reason is what a program complained of, finer than a kind of error.
type Reason string

// The reasons.
const (
	Other        Reason = ""              // none of the others
	NoModules    Reason = "no modules"    // the kernel has no ZFS
	Absent       Reason = "absent"        // no such dataset, snapshot or pool, or the pool is not imported
	NoParent     Reason = "no parent"     // the parent dataset does not exist
	Taken        Reason = "taken"         // the name is in use
	HasChildren  Reason = "has children"  // it contains other datasets, or snapshots
	HasClones    Reason = "has clones"    // the snapshot has clones
	Held         Reason = "held"          // by `zfs hold`
	Busy         Reason = "busy"          // mounted and in use, open, or being received
	NotAClone    Reason = "not a clone"   // it cannot be promoted
	SameSnapshot Reason = "same snapshot" // promoting would give a dataset two snapshots with the same name
	KeyMissing   Reason = "key missing"   // the key of an encrypted dataset is not loaded
	OtherKey     Reason = "other key"     // two datasets have different encryption roots
	Full         Reason = "full"          // the pool or a quota is full
	Denied       Reason = "denied"        // permission denied
	ReadOnly     Reason = "read-only"     // the pool is imported read-only
	Suspended    Reason = "suspended"     // the pool has lost its disks
	BadStream    Reason = "bad stream"    // the input of zfs receive is invalid
	NotAncestor  Reason = "not ancestor"  // the base does not precede the snapshot that is sent
	TooOld       Reason = "too old"       // this version does not support the option, property or feature
	BadValue     Reason = "bad value"     // invalid value of a property
	BadName      Reason = "bad name"      // invalid name
	WrongType    Reason = "wrong type"    // a volume instead of a filesystem, a pool instead of a dataset
	BadDisk      Reason = "bad disk"      // input/output errors, missing devices, checksums
	ElsewhereUse Reason = "elsewhere"     // the pool is imported by another host
	Interrupted  Reason = "interrupted"   // by a signal
)

const (
	modulesHint = "load the module with `modprobe zfs`, or install zfs-dkms if it does not exist"
	keyHint     = "load the key of its encryption root with `zfs load-key`"
)

// spaceHint is the hint of Full. It names operations of Pando.
var spaceHint = errs.Messagef("%s, or enlarge the zpool or its quota", errs.FreeSpace())

// row is a line of the table.
type row struct {
	reason  Reason
	pattern func() *regexp.Regexp
	kind    errs.Kind
	hint    string // with %USER% and %POOL% in it
}

// table maps the messages that zfs and zpool write to standard error. The first
// matching row applies. Tests provoke every row with the real programs, except those
// that need broken hardware.
var table = []row{
	{NoModules, lazyRE(`ZFS modules (are not|cannot be)|/dev/zfs and /proc/self/mounts|Failed to initialize the libzfs|` +
		`open '?/dev/zfs`), errs.Unsupported, modulesHint},
	{KeyMissing, lazyRE(`(?i)key (is )?not loaded|key must be loaded|key is not loaded or provided|` +
		`Encryption key not loaded`),
		errs.Permission, keyHint},
	{OtherKey, lazyRE(`outside (its|of its) encryption root|encrypted child outside|encryption failure|` +
		`IV set guid mismatch|failed to create encryption key`), errs.Unsupported, "a clone stays under the encryption " +
		"root of its origin"},
	{Suspended, lazyRE(`I/O is currently suspended|pool is (currently )?suspended`), errs.IO,
		"the zpool is suspended: find the cause with `zpool status`, fix it, then run `zpool clear`"},
	{ElsewhereUse, lazyRE(`imported on (a different )?host`), errs.InUse, "run `zpool export` on that host first"},
	{Denied, lazyRE(`(?i)permission denied|must be run as root|insufficient privileges|requires? root privileges|` +
		`delegated administration is disabled`), errs.Permission,
		"run it as root, or have root run `zfs allow -u %USER% " +
			"create,mount,clone,snapshot,promote,rename,destroy,userprop,volmode,volsize,readonly,canmount," +
			"mountpoint,compression,dedup,atime,receive,send DATASET`"},
	{ReadOnly, lazyRE(`(pool|dataset) is read-only|Read-only file system`), errs.Permission,
		"the zpool is imported read-only; import it read-write"},
	{Held, lazyRE(`it's being held`), errs.InUse, "list the holds with `zfs holds`"},
	{HasClones, lazyRE(`has dependent clones|snapshot is cloned|has clones`), errs.InUse, ""},
	{HasChildren, lazyRE(`(filesystem|volume|dataset) has children`), errs.InUse, ""},
	{SameSnapshot, lazyRE(`conflicting snapshot`), errs.Exists, "rename one of the two snapshots with `zfs rename`"},
	{Taken, lazyRE(`(dataset|destination|pool|snapshot) already exists|pool or dataset exists|destination '.*' exists|` +
		`must specify -F to overwrite|must destroy (it|them) to overwrite`), errs.Exists, ""},
	{NoParent, lazyRE(`parent does not exist|no such parent|new parent not found`), errs.NotFound,
		"create the parent dataset first with `zfs create`"},
	{Full, lazyRE(`out of space|quota exceeded|size is greater than available space|No space left|Disk quota exceeded`),
		errs.NoSpace, ""},
	{Busy, lazyRE(`(dataset|pool|target) is busy|Device or resource busy`), errs.InUse, ""},
	{NotAClone, lazyRE(`not a cloned filesystem`), errs.Invalid, ""},
	{NotAncestor, lazyRE(`is not earlier than|not an earlier snapshot|not an ancestor`), errs.Unsupported, ""},
	{BadStream, lazyRE(`invalid (backup )?stream|incomplete stream|checksum mismatch|failed to read from stream|` +
		`invalid record type|stream is not compatible|unable to restore`), errs.Damaged, ""},
	{TooOld, lazyRE(`invalid option|invalid property '|^usage:|invalid property: '|bad property list|` +
		`unrecognized command|unsupported version or feature|must be upgraded|does(n't| not) support|` +
		`not supported by zfs kernel module|` +
		`unsupported by kernel|feature '.*' (is )?not|A reboot may be required|feature not enabled`),
		errs.Unsupported, "use OpenZFS 2.1 or newer, programs and module, and run `zpool upgrade` if a feature is missing"},
	{BadValue, lazyRE(`invalid property value|must be (a multiple|power|zero)|must be one of|bad numeric value|` +
		`value is too large|volume size|volblocksize|read-only property|' is readonly|` +
		`property value too long|invalid numeric suffix|property name .* is too long|numeric property|` +
		`size is less than current|be smaller than|block size out of range`), errs.Invalid, ""},
	{WrongType, lazyRE(`doesn't apply to datasets of this type|not applicable to datasets of this type|` +
		`does not apply to (pools|datasets)|parent is not a filesystem|snapshots can not be`), errs.Invalid, ""},
	{BadName, lazyRE(`invalid (name|dataset name|character|argument)|name is too long|is too long|empty component|` +
		`reference, '|missing (dataset|'@')|must be a block device or regular file|leading slash|` +
		`trailing slash|doesn't begin with a letter|name must begin with a letter|delimiter|is reserved`), errs.Invalid, ""},
	{Absent, lazyRE(`does not exist|no such (pool|dataset|snapshot)|could not find any snapshots to destroy|` +
		`no longer exists`),
		errs.NotFound, ""},
	{BadDisk, lazyRE(`(?i)I/O error|input/output error|insufficient replicas|currently unavailable|pool is unavailable|` +
		`no valid replicas`), errs.IO, "find the faulty device with `zpool status -v`"},
	{Interrupted, lazyRE(`signal received`), errs.Canceled, ""},
}

// quotedName matches the name of a dataset in a message. Names may contain the words that the patterns look for.
var quotedName = lazyRE(`'[^']*[/@][^']*'`)

// lazyRE returns a pattern that is compiled on first use, because most runs of pando need none.
func lazyRE(s string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(s) })
}

// complaint is the cause of an error that one of the programs reported.
type complaint struct {
	reason Reason
	text   string
	cause  error
}

func (c *complaint) Error() string { return c.text }
func (c *complaint) Unwrap() error { return c.cause }

// Classify turns the message of a program into an error, by the table. An unknown
// message becomes an error of kind IO.
func Classify(op string, f *run.Failure) error {
	text := strings.TrimSpace(f.Stderr)
	e := &errs.Error{Kind: errs.IO, Op: op}
	c := &complaint{cause: f}
	plain := quotedName().ReplaceAllString(text, "''")
	for _, r := range table {
		if r.pattern().MatchString(plain) {
			e.Kind, c.reason = r.kind, r.reason
			e.Hint = errs.Messagef("%s", strings.ReplaceAll(r.hint, "%USER%", userName()))
			if r.reason == Full {
				e.Hint = spaceHint
			}
			break
		}
	}

	// Drop the usage text after an error about options, which is long.
	if head, _, ok := strings.Cut(text, "\nusage:"); ok {
		text = head
	}

	c.text = (&run.Failure{Err: f.Err, Stderr: text}).Error()
	if text != "" {
		lines := strings.Split(text, "\n")
		c.text = strings.Join(lines[:min(len(lines), 3)], "; ")
	}

	e.Err = c
	return e
}

// ReasonOf returns the reason of err, if one of the programs reported it, and Other otherwise.
func ReasonOf(err error) Reason {
	var c *complaint
	if errors.As(err, &c) {
		return c.reason
	}
	return Other
}

// Is reports whether one of the programs reported err with one of reasons.
func Is(err error, reasons ...Reason) bool {
	got := ReasonOf(err)
	for _, r := range reasons {
		if got == r && r != Other {
			return true
		}
	}
	return false
}

func userName() string {
	uid := strconv.Itoa(os.Geteuid())
	if u, err := user.LookupId(uid); err == nil {
		return u.Username
	}
	return uid
}
