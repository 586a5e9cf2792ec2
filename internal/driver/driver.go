// Package driver is the contract between Pando and the ways to make copies:
// a filesystem's reflinks, its snapshots, or plain copying.
//
// # Words
//
// An object is anything a driver keeps: a volume (writable) or a snapshot (an
// immutable point of one; generations of goldens are snapshots too). An object
// has an ID that is never reused, and an [Identity] stored beside it in the
// pool, so that a catalogue can be rebuilt from the pool alone.
//
// # Life of an object
//
// Create, Clone and Snapshot each make one new object. They return when the
// object and its identity are durable (unless Identity.Ephemeral). An object is
// whole when it has both data and identity, and it becomes so in one step. A
// process that dies in the middle leaves an object that List reports with
// Whole == false, or nothing. Clone, Usage and Attachment return NotFound for
// an incomplete object. A create that fails removes what it made and nothing
// else. The caller (the engine) records what it is about to make before it
// calls, and destroys what a dead process left.
//
// Destroy is the reverse: it removes the identity first. Destroying an object
// that does not exist succeeds, so that the caller may repeat it after a crash.
//
// Drivers describe how an object is mounted ([Attachment]); they never mount
// for their callers, and know neither the catalogue nor other drivers.
package driver

import (
	"context"
	"io"
	"iter"
	"os"
	"time"
)

// ObjectID names an object for ever: 26 characters [a-v0-9], 128 random bits.
// See [NewID].
type ObjectID string

// Kind says what an object is for.
type Kind string

const (
	Volume     Kind = "volume"     // writable, has a name
	Snapshot   Kind = "snapshot"   // immutable point of a volume
	Generation Kind = "generation" // immutable, numbered, of a golden
	Scratch    Kind = "scratch"    // being made; garbage once the process that makes it has died
	Layer      Kind = "layer"      // a generation that was destroyed, and stays because overlays need it
)

// Immutable reports whether the content of objects of this kind never changes.
func (k Kind) Immutable() bool { return k == Snapshot || k == Generation || k == Layer }

// FS is what a volume holds.
type FS string

const (
	Native FS = "native" // a tree in the pool's own filesystem
	Ext4   FS = "ext4"   // a block image with ext4 inside
	XFS    FS = "xfs"    // a block image with XFS inside
	None   FS = "none"   // a raw block image
)

// IsImage reports whether a volume of this kind is one block image.
func (f FS) IsImage() bool { return f != Native }

// Identity is what the pool itself records of an object. It is written once, when the object becomes whole, and holds
// everything that a catalogue needs except last-use times. Its JSON form is an on-disk format: see FORMAT.md.
type Identity struct {
	Version int      `json:"v"`              // IdentityVersion
	Pool    string   `json:"pool"`           // ID of the pool
	ID      ObjectID `json:"id"`             //
	Kind    Kind     `json:"kind"`           //
	Name    string   `json:"name,omitempty"` // name of a volume, or of a snapshot within its volume
	// Golden and Generation are what a generation is; for a volume or snapshot, the generation that it descends from, its
	// base.
	Golden     string    `json:"golden,omitempty"`
	Generation int       `json:"gen,omitempty"` // number of the generation, from 1
	Volume     ObjectID  `json:"vol,omitempty"` // lineage of a snapshot's volume; for a volume, see Lineage
	FS         FS        `json:"fs"`
	SizeBytes  int64     `json:"size"`                // size of the block device; 0 for native
	Sector     uint32    `json:"sector,omitempty"`    // logical sector size of the block device, bytes; 0 for native
	Origin     string    `json:"origin,omitempty"`    // a reference, as a person would write it
	OriginID   ObjectID  `json:"origin_id,omitempty"` //
	CreatedAt  time.Time `json:"at"`
	// Order of a snapshot is its place among the snapshots of the pool: one that came into it later has a larger number,
	// even if the clock was set back in between. It is a hybrid logical clock (Kulkarni et al. 2014): the time, in
	// nanoseconds since 1970, but always more than the number before. A volume with Replaces has that of the snapshot that
	// was it before.
	Order     int64     `json:"order,omitempty"`
	ExpiresAt time.Time `json:"expires,omitzero"`
	Ephemeral bool      `json:"eph,omitempty"` // need not survive a reboot; not made durable
	// Lower is not "" for a volume or snapshot that holds only the changes to another object, an immutable one, as
	// overlayfs stores them (see [Identity.IsOverlay]). That object stays in the pool for as long as anything names it so.
	Lower ObjectID `json:"lower,omitempty"`
	// Mirror means that a generation was made from its golden's source, and never written by a session.
	Mirror bool   `json:"mirror,omitempty"`
	BootID string `json:"boot"` // ID of the boot that made it

	// Owner is the user ID of the user who asked for the volume or golden. What becomes of it keeps its owner: all
	// snapshots and generations, whoever makes them, and a successor.
	Owner uint32 `json:"owner,omitempty"`

	Consistency      Consistency `json:"cons,omitempty"`  // how consistent a snapshot is
	Pinned           time.Time   `json:"pinned,omitzero"` // not to be destroyed before; Forever
	GoldenProperties             // a golden's are those of its current generation; other objects have only Labels
	// Since is when the golden of a generation was made, if that was not with it.
	Since    time.Time `json:"since,omitzero"`
	Replaces ObjectID  `json:"repl,omitempty"`   // object that was the volume before, and is a snapshot now
	Before   string    `json:"before,omitempty"` // name of that snapshot

	// Extra are fields that a newer version of Pando has written, as JSON without the
	// braces around it: they are kept when an identity is replaced.
	Extra string `json:"-"`

	// Soon is not stored: the caller will mount the object as soon as it is made, so that a driver may prepare it for that
	// in the same step.
	Soon bool `json:"-"`
}

// IsOverlay reports whether the object is the upper layer of an overlay, which is useful only together with Lower.
func (id Identity) IsOverlay() bool { return id.Lower != "" }

// Lineage returns the ID by which the snapshots of a volume refer to it. It stays the same when the volume is replaced
// by a successor (rewind, rebase), which has another ID.
func (id Identity) Lineage() ObjectID {
	if id.Volume != "" {
		return id.Volume
	}
	return id.ID
}

// Forever is the end of a pin that lasts until the object is unpinned.
var Forever = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)

// Consistency says how consistent the content of a snapshot is.
type Consistency string

const (
	Clean Consistency = "clean" // consistent, with all that was written before it was begun; there is no log to replay
	Crash Consistency = "crash" // one moment of a filesystem in use: as after a power loss
)

// MaxIdentityBytes limits the JSON of an identity, for all drivers: it is the longest value of a ZFS user property
// (zfsprops(7)).
const MaxIdentityBytes = 8191

// IdentityVersion is the version of the identity format.
const IdentityVersion = 1

// GoldenProperties are the properties of a golden that users set. The identity of its current generation holds them;
// older generations keep those of when they were current.
type GoldenProperties struct {
	Keep    int           `json:"keep,omitempty"` // newest generations that a publish or pull leaves; 0: all
	Overlay OverlayPolicy `json:"overlay,omitempty"`
	Source  string        `json:"source,omitempty"` // what a refresh makes new generations from, as JSON; "": nothing
	Labels  Labels        `json:"labels,omitzero"`  // volumes and snapshots, too, have labels of their own here
}

// CloneCost says what the time of Clone and Snapshot depends on.
type CloneCost string

const (
	CostConstant CloneCost = "constant" // nothing
	CostExtents  CloneCost = "extents"  // the number of extents of the origin
	CostData     CloneCost = "data"     // the bytes and files of the origin
)

// Caps says what a driver can do. It does not change while the pool is open.
type Caps struct {
	Name      string    // of the driver: "reflink"
	FS        []FS      // kinds of volumes, the default first
	CloneCost CloneCost //
	Sharing   bool      // clones share blocks with their origin
	Atomic    bool      // Clone and Snapshot copy one moment, even while the origin is being written
	Unsynced  bool      // a copy of a tree in use includes all that was written, even if it was not synced
	NeedsRoot bool      // for anything but reading
}

// Supports reports whether fs is among the kinds of volumes.
func (c Caps) Supports(fs FS) bool {
	for _, f := range c.FS {
		if f == fs {
			return true
		}
	}
	return false
}

// Usage is the space an object takes in the pool, exact at the moment of the
// call, in bytes of data (filesystem metadata of the pool is not included).
// LogicalBytes = ExclusiveBytes + SharedBytes.
type Usage struct {
	LogicalBytes   int64 // what a full copy would take
	ExclusiveBytes int64 // what destroying it would return
	SharedBytes    int64 // also reachable from another object
	Extents        int64 // pieces on disk: what a clone must duplicate where CloneCost is "extents"
	// in addition: of destroyed objects that the driver keeps because they are tied to this one; see Tied
	TiedBytes int64
}

// Object is a row of List.
type Object struct {
	ID        ObjectID
	Whole     bool     // it has data and identity, so it is complete
	Identity  Identity // zero unless Whole
	Committed bool     // see Committer
	Err       error    // the object exists but cannot be read (Damaged, TooNew, IO ...); Whole is false
}

// Attachment describes how an object is made usable at a path. Exactly one of
// Image, Source and Tree is set.
type Attachment struct {
	Image       string   // absolute path of a block image, to be attached as a block device
	Block       bool     // Image is a block device itself, while it is active: see Activator
	FS          FS       // what is inside Image
	Options     []string // mount options that the filesystem in it needs, such as nouuid
	NoSync      []string // more of them for an ephemeral volume: its syncs need not reach the disk; nil: there are none
	SectorBytes uint32   // logical sector size that the block device must have
	Source      string   // name by which the kernel mounts a filesystem of type Type
	Type        string   // "zfs"
	Tree        string   // absolute path of a directory, to be bind-mounted
	ReadOnly    bool     // snapshots: never attach them writable
}

// Driver keeps objects in one pool. All methods may be called concurrently
// from several goroutines and several processes, for different objects; the
// caller keeps two writers off the same object. Errors are *errs.Error of the
// kinds named, or wrap the system's error number.
type Driver interface {
	// Caps never fails and does no I/O.
	Caps() Caps

	// Create makes an empty volume of id.SizeBytes (ignored for Native) that
	// contains the filesystem id.FS. Exists if the ID is taken, Invalid if the
	// size is too small for the filesystem, Unsupported for a kind of
	// filesystem outside Caps. Durable on return. On error nothing remains.
	Create(ctx context.Context, id Identity) error

	// Clone makes a volume with the content of from, which is a volume or
	// snapshot that is not being written. id.SizeBytes may be 0 (the size of
	// the origin) or larger than the origin's; then only the block device is
	// larger, and the caller grows the filesystem inside. NotFound, Exists,
	// NoSpace, Invalid (smaller than the origin). Durable on return unless
	// id.Ephemeral. On error nothing remains.
	Clone(ctx context.Context, from ObjectID, id Identity) error

	// Snapshot makes an immutable copy of from, atomically: a point between
	// two writes. The caller freezes a mounted filesystem first. It returns
	// the same kinds of errors as Clone, and is as durable.
	Snapshot(ctx context.Context, from ObjectID, id Identity) error

	// Destroy removes the object. Absent is success. The identity is gone on return; space may return later. Idempotent;
	// not durable by itself (an object that reappears after a power loss is destroyed again by the caller, who recorded
	// it; see Syncer). The object is not mounted.
	Destroy(ctx context.Context, id ObjectID) error

	// Usage measures the object. NotFound. The cost is that of reading its
	// extents, for trees that of walking it.
	Usage(ctx context.Context, id ObjectID) (Usage, error)

	// List yields every object of Pando's, in no order, including broken ones. It neither lists nor touches anything that
	// does not look like Pando's. An error ends the sequence. Objects that are made or destroyed in the meantime may or
	// may not be listed.
	List(ctx context.Context) iter.Seq2[Object, error]

	// Attachment describes how to attach or mount the object. NotFound, Damaged, TooNew.
	Attachment(ctx context.Context, id ObjectID) (Attachment, error)
}

// Sealer is a driver whose clones cost by extents: Seal makes a snapshot of
// from (which is not being written) whose content is stored in as few extents
// as the pool allows, in preallocated space. progress, if not nil, is called
// with the bytes done and the total. It returns the same kinds of errors as
// Snapshot, and is as durable.
type Sealer interface {
	Seal(ctx context.Context, from ObjectID, id Identity, progress func(done, total int64)) error
}

// Finisher is a driver for which a snapshot is a copy: Finish turns the volume that has id.ID, which is not mounted,
// into the immutable object that id describes, without copying. Durable on return; after a crash the object is in its
// old or its new state. NotFound.
type Finisher interface {
	Finish(ctx context.Context, id Identity) error
}

// Rewriter can replace the identity of an object, atomically and durably:
// after a crash it is the old or the new one. NotFound.
type Rewriter interface {
	SetIdentity(ctx context.Context, id Identity) error
}

// Resizer is a driver whose images can get another size.
type Resizer interface {
	// Resize makes the image of a volume exactly size bytes long, even while it is attached; the block device stays as it
	// is. The new part reads as zeros. Making it shorter is for undoing an earlier call: nothing may use what is cut off.
	// The identity stays as it is. Idempotent. NotFound, NoSpace. Durable on return.
	Resize(ctx context.Context, id ObjectID, size int64) error
}

// Committer is a driver that can note beside an object that it is in the catalogue, at
// almost no cost: it does not wait for the disk, and a power loss soon after may lose
// the note. The note stays when the identity is replaced.
type Committer interface {
	// Commit makes the note. Idempotent. NotFound.
	Commit(id ObjectID) error

	// Committed reports whether the note exists. NotFound, Damaged, TooNew.
	Committed(id ObjectID) (bool, error)
}

// Condition describes how an object is stored in the pool, whole or not.
type Condition struct {
	Data      bool   // the pool has data with its ID
	SizeBytes int64  // of an image; 0 for a tree
	Mode      string // what is wrong with the mode of the data for its kind, for users; "": nothing
	Leftover  bool   // an interrupted replacement of the identity has left something
	Err       error  // the data exists but cannot be opened
}

// Inspector examines objects that may be broken, and repairs what surrounds their content. Every driver that is a
// Rewriter should be one.
type Inspector interface {
	// Inspect describes how the object with id.ID is stored, compared with how
	// one of id.Kind should be. It changes nothing. It reports defects in the
	// Condition, not as an error.
	Inspect(ctx context.Context, id Identity) (Condition, error)

	// Restore writes the identity of existing data, whether or not the data has
	// a readable one, removes leftovers, and gives the data the mode of its
	// kind. Durable and idempotent. NotFound if there is no data.
	Restore(ctx context.Context, id Identity) error
}

// LiveCopier copies a volume that is in use.
type LiveCopier interface {
	// CopyLive is Clone, or with immutable Snapshot, of a volume that programs
	// may be writing to. If Caps.Atomic and quiet is not nil, CopyLive calls
	// quiet once with the step that copies the content; quiet calls that step,
	// and keeps the volume from changing until it returns. Everything else is
	// done before or after. Without quiet the copy is one moment of the volume
	// as stored in the pool. A driver that is not Atomic ignores quiet and
	// copies what has changed again until nothing has; Conflict if that does
	// not come to an end. It returns the same kinds of errors as Clone, and
	// those of quiet, and is as durable.
	CopyLive(ctx context.Context, from ObjectID, id Identity, immutable bool, quiet func(copy func() error) error) error
}

// Addresser is a driver that can name the content of an object by where it is stored, at a
// cost that grows only with the number of its extents.
type Addresser interface {
	// Address returns the same text for two objects only if they had the same content,
	// to the last byte, at one moment during the two calls; "" if it cannot tell. The
	// content at an address stays the same as long as an object with that address
	// exists that nobody writes to. NotFound.
	Address(ctx context.Context, id ObjectID) (string, error)
}

// Batcher is a driver that can make many clones with one wait for the disk.
type Batcher interface {
	// Batch begins a batch of clones of from, which is not being written and stays
	// until Close. NotFound.
	Batch(ctx context.Context, from ObjectID) (Batch, error)
}

// Batch makes clones of one object.
type Batch interface {
	// Clone is Driver.Clone of the batch's origin, but the clone is whole and
	// durable only after Flush; an ephemeral clone is whole at once. It may be called
	// concurrently.
	Clone(ctx context.Context, id Identity) error

	// Flush makes all clones made before the call whole and durable. If it fails, any
	// of them may be neither.
	Flush(ctx context.Context) error

	// Close releases the origin. It flushes nothing.
	Close() error
}

// Activator is a driver whose images are block devices that exist only while they
// are used. All methods may be called by several processes at once for the same
// object.
type Activator interface {
	// Activate creates the block device of an object unless it exists, makes sure
	// that it is that object's, and opens it for reading. The file's name is the
	// path of the device, which cannot disappear while it is open, nor until
	// Deactivate. It waits for the device for a limited time. NotFound,
	// Unsupported (with a hint) if the device does not appear.
	Activate(ctx context.Context, id ObjectID) (*os.File, error)

	// Deactivate removes the device. Absent is success. InUse if the device is
	// open or mounted: then it stays. It waits a moment for users that are about
	// to close it.
	Deactivate(ctx context.Context, id ObjectID) error

	// Active lists the objects whose devices exist, in no order. Its cost does not
	// depend on idle objects.
	Active(ctx context.Context) ([]ObjectID, error)

	// Held reports whether the device exists and a filesystem on it is mounted, in
	// any namespace, or a process has it open exclusively. It is cheap.
	Held(ctx context.Context, id ObjectID) (bool, error)
}

// Space is the space of a pool, in bytes.
type Space struct {
	TotalBytes int64
	FreeBytes  int64
	UsedBytes  int64
}

// Spacer is a driver whose objects are stored outside the filesystem of its
// directory. With rough, figures may be some seconds old as long as plenty of
// space is free. Reclaiming reports whether the space of destroyed objects is
// still being freed.
type Spacer interface {
	Space(ctx context.Context, rough bool) (Space, error)
	Reclaiming(ctx context.Context) (bool, error)
}

// Measurer measures all whole objects at once, at less cost than one by one.
type Measurer interface {
	Usages(ctx context.Context) (map[ObjectID]Usage, error)
}

// Tie is a destroyed object that the driver must keep while others exist.
type Tie struct {
	Name    string     // what is kept, by the driver's own name: "tank/pando/<id>@<id>"
	ID      ObjectID   // of the destroyed object
	Holder  ObjectID   // the object it is stored with; "" if it is in the graveyard
	Bytes   int64      // space that removing it would return, as far as the driver can tell
	HeldBy  []ObjectID // objects that depend on it
	Foreign []string   // names of things that are not Pando's and depend on it
}

// Tied is a driver whose objects cannot always be removed in the order in which they are destroyed. Destroy then
// succeeds at once, and hides the object until it can be removed.
type Tied interface {
	// Ties lists the ties, in no order.
	Ties(ctx context.Context) ([]Tie, error)

	// Reap removes destroyed objects that are no longer tied, and returns how many
	// it removed. Idempotent.
	Reap(ctx context.Context) (int, error)
}

// Flattener can make a copy of an object that shares nothing with any other.
type Flattener interface {
	// FlattenCost returns how many bytes Flatten will read and write, at most. NotFound.
	FlattenCost(ctx context.Context, id ObjectID) (int64, error)

	// Flatten is Clone of an object that is not being written, but copies
	// everything. progress, if not nil, is called with the bytes done and the
	// total, roughly. It returns the same kinds of errors as Clone, and is as
	// durable.
	Flatten(ctx context.Context, from ObjectID, id Identity, progress func(done, total int64)) error
}

// Streamer is a driver that can send trees as streams in the filesystem's own
// format, which only the same kind of driver can read. A stream holds an
// immutable object (a snapshot or generation), or its difference from another,
// its base. The receiver must have the same base, with the same content: an
// object that was itself received from the stream of that base, or the object
// that the base was sent from. Only trees (Native) can be sent.
type Streamer interface {
	// Send writes the stream of from to w, in order, from beginning to end; with
	// a base, that of the difference from it. The caller keeps both objects from
	// being destroyed until Send returns. Two streams of the same objects may
	// differ in their bytes, and a stream cannot be resumed in the middle. An error
	// of w ends it and is returned (perhaps wrapped). NotFound, Invalid (an object
	// that is not immutable, or not a tree), Unsupported (base cannot serve as
	// one), IO, and the error of ctx.
	Send(ctx context.Context, from, base ObjectID, w io.Writer) error

	// Receive makes the immutable object id, of kind Snapshot or Generation, from
	// the stream r, which holds the difference from base, or a whole object if
	// base is "". It reads r to its end, which must be the end of the stream. The
	// object becomes whole in one step, when all of it has been received; durable
	// on return unless id.Ephemeral. On error nothing remains. A process that dies
	// leaves an incomplete object with id.ID, which Destroy removes. Others may
	// have tampered with r: nothing in it may lead outside the object. Exists,
	// NotFound (base), Conflict (it holds the difference from an object other than
	// base, or a whole object; nothing was done), Invalid (an impossible id or
	// base), Damaged (not a stream, cut short, or it does not fit base),
	// Unsupported (an unknown version), NoSpace, errors of r, and the error of ctx.
	Receive(ctx context.Context, id Identity, base ObjectID, r io.Reader) error
}

// StreamPlan describes a stream before it is sent.
type StreamPlan struct {
	// Raw: the blocks of an encrypted tree are sent as stored on disk. The key need not be loaded to send them, but the
	// receiver needs it to read them. A raw difference fits only a base that was itself sent and received raw.
	Raw bool

	Bytes int64 // approximate length; 0: not known

	// SavedBytes is how much less space than Bytes the same data may use in the pool, at most: a block that is referred to
	// more than once (by block cloning or dedup) is stored once, but sent each time.
	SavedBytes int64
}

// Planner is a Streamer that can describe a stream beforehand.
type Planner interface {
	// Plan describes the stream that Send of the same objects would write, without reading their content. It does not
	// check whether the base can serve as one: Send does. NotFound, Invalid.
	Plan(ctx context.Context, from, base ObjectID) (StreamPlan, error)
}

// Key is the encryption key that must be loaded before an encrypted object can be mounted.
type Key struct {
	Root   string `json:"root"`   // what has the key, by the driver's own name: "tank/pando"; "": not encrypted
	Loaded bool   `json:"loaded"` // the key
	Own    bool   `json:"own"`    // not the pool's key: the object was received raw, or made from one that was
}

// Keyed is a driver whose objects may be encrypted.
type Keyed interface {
	// Key returns which key an object has. NotFound.
	Key(ctx context.Context, id ObjectID) (Key, error)
}

// Comparer is a driver that can tell at almost no cost that two immutable objects are the same, because it numbers
// changes.
type Comparer interface {
	// Same reports whether two immutable objects are the same; id was made from the same volume as base, and later. True
	// is certain. False is not: they may differ, have no common history, or be volumes. NotFound.
	Same(ctx context.Context, id, base ObjectID) (bool, error)
}

// Unmaker is a driver that, when opened with create, makes something outside its
// directory. Unmake removes it, once no object is left. InUse if it contains
// something that is not Pando's, which stays. Idempotent.
type Unmaker interface {
	Unmake(ctx context.Context) error

	// Foreign lists, once no object is left, what is not Pando's: Unmake would
	// refuse to remove it.
	Foreign(ctx context.Context) ([]string, error)
}

// Syncer is a driver that can make everything durable at once that was created
// and destroyed before the call.
type Syncer interface {
	Sync(ctx context.Context) error
}

// Opener opens the driver on dir, the pool's directory for objects. Identities
// must have poolID. With create it lays out an empty directory. Unsupported
// (with a hint) if the filesystem of dir cannot do what the driver needs: it
// finds out by trying, not by the name of the filesystem.
type Opener func(ctx context.Context, dir, poolID string, create bool) (Driver, error)
