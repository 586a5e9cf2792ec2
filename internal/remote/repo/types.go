package repo

import (
	"cmp"
	"time"
)

// ID is a random 128-bit number that names a repository, a key, a manifest or a
// session. Its text has 26 characters [a-v0-9], like the IDs of objects in a pool.
type ID [16]byte

// Content is the form in which a manifest holds a volume.
type Content string

const (
	Block  Content = "block"  // ranges of a block image
	Stream Content = "stream" // a driver's own send stream, relative to Parent if that is set
	// a stream of internal/tree/treestream, which every driver with trees can read; relative to Parent if that is set
	Tree Content = "tree"
)

// Chained reports whether the content is a stream, which can be restored only on top of the point it differs from.
func (c Content) Chained() bool { return c == Stream || c == Tree }

// known reports whether this version of pando can read such content.
func (c Content) known() bool { return c == Block || c.Chained() }

// Sizes of the format.
const (
	FrameBytes     = 512 << 10 // of data in one frame, at most
	SegmentBytes   = 16 << 20  // a segment is closed when it reaches this size
	MaxSegment     = 32 << 20  // a segment is never larger
	BlockBytes     = 4096      // ranges begin and end at multiples of it, or at the end of the volume
	SumBytes       = 16
	MaxVolumeBytes = 1 << 50
)

// Segment names an object that holds frames: the N-th segment that a session wrote.
type Segment struct {
	Session ID
	N       uint32
}

// Codec is how the bytes of a frame were stored before they were encrypted.
type Codec uint8

const (
	Raw  Codec = 0 // uncompressed: compression would save too little
	Zstd Codec = 1
)

// Frame is the location of a frame: encrypted bytes in a segment.
type Frame struct {
	Segment Segment
	Index   uint32 // in the segment, from 0
	Offset  uint32 // of the stored bytes in the object
	Stored  uint32 // bytes in the object, the authentication tag included
	Plain   uint32 // bytes of content
	Codec   Codec
}

// Sum is a keyed hash of content, for comparing contents. Zero means unknown.
type Sum [SumBytes]byte

// Piece is a range of a volume and the location of its content. Bytes outside all pieces
// are zero.
type Piece struct {
	Offset int64 // in the volume, bytes
	Length int64 // bytes, at most FrameBytes
	Frame  Frame
	Within uint32 // the piece begins at this offset in the frame's content
	Sum    Sum    // of the piece; zero if the piece is only part of what was written
}

// End returns the first offset after the piece.
func (p Piece) End() int64 { return p.Offset + p.Length }

// Use is a segment that a manifest lists, and its size.
type Use struct {
	Segment Segment
	Size    uint32 // bytes of the object; 0: unknown
}

// Extension is information about a point beyond the fields of its manifest. See [Manifest.MarkOverlay] for the one that
// this version of the format defines.
type Extension struct {
	Name     string // a-z, 0-9, dots and hyphens, at most 64 bytes
	Critical bool   // a reader that does not support it must not use the manifest
	Data     []byte
}

// Origin names the point that a volume was cloned from.
type Origin struct {
	Ref      string `json:"ref"`    // as a user would write it: "web@3"
	Volume   string `json:"volume"` // name of its head: "web"
	Manifest ID     `json:"manifest"`
}

// StateOrder orders the states of a volume or golden, whatever the clocks of hosts say. States of different epochs come
// from different pools: that of the later epoch is newer. Those of one epoch come from one pool, which knows their
// order. A state that is pushed again, or late, keeps its order.
type StateOrder struct {
	Epoch uint64 `json:"epoch,omitempty"` // epoch of the head when the state was first pushed; 0 for a generation
	Order int64  `json:"order,omitempty"` // place of a snapshot (engine.Point.Place), or number of a generation
}

// Compare is negative if a is an older state than b, and 0 if they are the same.
func (a StateOrder) Compare(b StateOrder) int {
	return cmp.Or(cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Order, b.Order))
}

// Manifest describes one point of a volume, with everything needed to restore it.
type Manifest struct {
	ID          ID        `json:"id"`
	Volume      string    `json:"volume"` // name of its head when it was written
	Point       string    `json:"point"`  // name of the snapshot, or number of the generation
	Content     Content   `json:"content"`
	FS          string    `json:"fs"`
	SizeBytes   int64     `json:"size"`
	Sector      uint32    `json:"sector,omitempty"`
	CreatedAt   time.Time `json:"at"`
	Consistency string    `json:"cons,omitempty"`
	Source      string    `json:"source"` // ID of the object in the pool that was read
	Session     ID        `json:"session"`
	Parent      ID        `json:"parent,omitzero"` // manifest it was compared with; a stream cannot be restored without it
	Origin      *Origin   `json:"origin,omitempty"`
	// of a stream: its blocks are encrypted as they were on the disk of the pool
	Raw     bool  `json:"raw,omitempty"`
	Logical int64 `json:"logical"` // bytes of content, without zeros
	Added   int64 `json:"added"`   // bytes that the push of this point stored
	StateOrder

	Stream     []Frame     `json:"-"` // of Stream and Tree, in order
	Map        NodeRef     `json:"-"` // of Block: the root, of RootLevel(SizeBytes); zero: no data
	Extensions []Extension `json:"-"` // in order of name

	// The segments that contain Map and Stream, all that the session had written so far, and some older ones of known
	// size; not all of them are needed.
	Uses []Use `json:"-"`
}

// Writer identifies the pool that may write a head.
type Writer struct {
	Pool string `json:"pool"` // ID of the pool
	Host string `json:"host"` // informational
}

// Point is the entry of a manifest in its head.
type Point struct {
	Seq         uint64    `json:"seq"`  // from 1, never used again within a head
	Name        string    `json:"name"` // of the snapshot, or number of the generation
	Manifest    ID        `json:"manifest"`
	Source      string    `json:"source"` // ID of the object in the writer's pool
	Content     Content   `json:"content"`
	FS          string    `json:"fs"`
	SizeBytes   int64     `json:"size"`
	CreatedAt   time.Time `json:"at"`
	Consistency string    `json:"cons,omitempty"`
	Logical     int64     `json:"logical"`
	Added       int64     `json:"added"`
	Parent      ID        `json:"parent,omitzero"`    // of a stream: the manifest that must not be deleted before it
	Keep        bool      `json:"keep,omitempty"`     // a user asked to keep it
	OriginRef   string    `json:"origin,omitempty"`   // informational
	OriginVol   string    `json:"origin_v,omitempty"` // head of the origin
	OriginID    ID        `json:"origin_m,omitzero"`  // manifest of the origin
	StateOrder
}

// Head is the record of one volume or golden in a remote. It changes only by
// compare-and-swap.
type Head struct {
	Name    string      `json:"name"`
	Golden  bool        `json:"golden,omitempty"` // its points are generations
	Lineage string      `json:"lineage"`          // of the volume in the writer's pool
	Epoch   uint64      `json:"epoch"`            // grows when another writer takes over; never goes back
	Writer  Writer      `json:"writer"`
	NextSeq uint64      `json:"next"`
	Recent  []Point     `json:"points"`          // the newest points, oldest first; older ones are in Pages
	Pages   []PointPage `json:"pages,omitempty"` // pages of older points, oldest first
	// Seq of the point with the newest state, if an older state was pushed after it; see Newest
	Latest  uint64 `json:"latest,omitempty"`
	Gone    bool   `json:"gone,omitempty"`   // deleted; the head stays so that its epoch is not reused
	Fenced  []ID   `json:"fenced,omitempty"` // sessions that may no longer commit, the newest last
	Token   ID     `json:"token,omitzero"`   // of the writer's last commit, which the writer remembers; zero: not checked
	WriteID ID     `json:"write"`            // of this write, so that its writer can recognize it
}

// SessionKind is the operation that a session performs.
type SessionKind string

const (
	Push SessionKind = "push"
	Pull SessionKind = "pull"

	// Repack is a prune that moves frames. It commits to no head; its packs are not garbage while the session exists.
	Repack SessionKind = "repack"
)

// Session marks a running operation: objects that it writes are not garbage, and manifests
// that it pins are kept. Users also see it as the lease of the writer of a volume.
type Session struct {
	ID      ID          `json:"id"`
	Kind    SessionKind `json:"kind"`
	Heads   []string    `json:"heads"` // names of the volumes it may commit to
	Writer  Writer      `json:"writer"`
	PID     int         `json:"pid"`
	Pins    []ID        `json:"pins,omitempty"` // manifests that must be kept
	Beat    uint64      `json:"beat"`           // increases with every renewal
	Token   ID          `json:"token,omitzero"` // of this write: a process that knows it has written it; zero: none
	Started time.Time   `json:"started"`        // by the clock of its host, informational
	Renewed time.Time   `json:"renewed"`        // by the clock of its host, informational

	writes sessionWrites // state of the process that owns the session
}
