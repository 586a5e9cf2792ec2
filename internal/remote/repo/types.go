package repo

import (
	"time"
)

// ID is a random number of 128 bits that names a repository, a key, a manifest or
// a session. Its text is 26 characters [a-v0-9], as that of objects in a pool.
type ID [16]byte

// Content is in which form a manifest holds a volume.
type Content string

const (
	Block  Content = "block"  // ranges of a block image
	Stream Content = "stream" // a driver's own send stream, from Parent if that is set
	// a stream of internal/tree/treestream, which every driver with trees can read, from Parent if that is set
	Tree Content = "tree"
)

// Chained reports whether the content is one stream, which can be read only with what it is the difference from.
func (c Content) Chained() bool { return c == Stream || c == Tree }

// known reports whether this version of the program can read such content.
func (c Content) known() bool { return c == Block || c.Chained() }

// Sizes of the format.
const (
	FrameBytes     = 512 << 10 // of data in one frame, at most
	SegmentBytes   = 16 << 20  // a segment is closed when it has this much
	MaxSegment     = 32 << 20  // and never has more
	RegionBytes    = 1 << 30   // of a volume, that one page describes
	BlockBytes     = 4096      // ranges begin and end at multiples of it, or at the volume's end
	MaxPageBytes   = 16 << 20  // encoded, before compression
	SumBytes       = 16
	MaxVolumeBytes = 1 << 50
)

// Segment names an object that holds frames: the N-th of what a session wrote.
type Segment struct {
	Session ID
	N       uint32
}

// Codec is how the bytes of a frame were stored before they were encrypted.
type Codec uint8

const (
	Raw  Codec = 0 // as they are: they could not be compressed
	Zstd Codec = 1
)

// Frame says where a frame is: encrypted bytes in a segment.
type Frame struct {
	Segment Segment
	Index   uint32 // in the segment, from 0
	Offset  uint32 // of the stored bytes in the object
	Stored  uint32 // bytes in the object, the authentication tag included
	Plain   uint32 // bytes of content
	Codec   Codec
}

// Sum is a keyed hash of content, to see that it is the same. Zero: not known.
type Sum [SumBytes]byte

// Piece is a range of a volume and where its content is. Bytes in no piece are
// zero.
type Piece struct {
	Offset int64 // in the volume, bytes
	Length int64 // bytes, at most FrameBytes
	Frame  Frame
	Within uint32 // the piece begins at this offset in the frame's content
	Sum    Sum    // of the piece; zero if it is a part of what was written
}

// End is the first offset behind the piece.
func (p Piece) End() int64 { return p.Offset + p.Length }

// Page says where the pieces of one region of a volume are listed. Pieces do not
// cross regions. Regions without data have no page.
type Page struct {
	Region uint32 // [Region*RegionBytes, (Region+1)*RegionBytes)
	Frame  Frame
}

// Use is a segment that a manifest needs, and how much of it.
type Use struct {
	Segment Segment
	// stored bytes of frames that the manifest refers to, once for every page that does (never 0); 0 in version 2
	Bytes int64
	Size  uint32 // bytes of the object; 0: not known
}

// Extension is something about a point that this version of the format does not describe.
type Extension struct {
	Name     string // a-z, 0-9, dots and hyphens, at most 64 bytes
	Critical bool   // who does not know it must not use the manifest
	Data     []byte
}

// Origin says what a volume was cloned from.
type Origin struct {
	Ref      string `json:"ref"`    // as a person would write it: "web@3"
	Volume   string `json:"volume"` // name of its head: "web"
	Manifest ID     `json:"manifest"`
}

// Manifest is one point of a volume: all that is needed to make it again.
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
	Source      string    `json:"source"` // ID of the object in the pool that it was read from
	Session     ID        `json:"session"`
	Parent      ID        `json:"parent,omitzero"` // what it was compared with; of a stream: what must be there to read it
	Origin      *Origin   `json:"origin,omitempty"`
	// of a stream: its blocks are encrypted as they lay on the disk of the pool
	Raw     bool     `json:"raw,omitempty"`
	Logical int64    `json:"logical"`         // bytes of content, zeros left out
	Added   int64    `json:"added"`           // bytes that were stored for it
	Sizes   []uint32 `json:"sizes,omitempty"` // only in the object: of Uses, in their order

	Version    int         `json:"-"` // of the object: 2, or 1, which 0 also means
	Stream     []Frame     `json:"-"` // of Stream, in order
	Pages      []Page      `json:"-"` // of Block, in order of region; only in version 1
	Map        NodeRef     `json:"-"` // of Block: the root, of RootLevel(SizeBytes); zero: all is zero. Only in version 2
	Extensions []Extension `json:"-"` // in order of name; only in version 2

	// Of version 1: all segments that Pages, their pieces and Stream are in. Of version 2: those that Map and Stream are
	// in, all that its session had written until then, and some older ones whose size is known. They may not be needed.
	Uses []Use `json:"-"`
}

// Writer is who may write a head.
type Writer struct {
	Pool string `json:"pool"` // ID of the pool
	Host string `json:"host"` // for people
}

// Point is a manifest as its head lists it.
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
	Parent      ID        `json:"parent,omitzero"`    // of a stream: the manifest that must stay for it
	Keep        bool      `json:"keep,omitempty"`     // somebody asked to keep it
	OriginRef   string    `json:"origin,omitempty"`   // for people
	OriginVol   string    `json:"origin_v,omitempty"` // head of the origin
	OriginID    ID        `json:"origin_m,omitzero"`  // manifest of the origin
}

// Head is all that a remote knows of one volume or golden. It changes by
// compare-and-swap only.
type Head struct {
	Name    string      `json:"name"`
	Golden  bool        `json:"golden,omitempty"` // its points are generations
	Lineage string      `json:"lineage"`          // of the volume in the writer's pool
	Epoch   uint64      `json:"epoch"`            // grows when another writer takes over; never goes back
	Writer  Writer      `json:"writer"`
	NextSeq uint64      `json:"next"`
	Recent  []Point     `json:"points"`          // the newest points, oldest first; older ones are in Pages
	Pages   []PointPage `json:"pages,omitempty"` // where older points are, oldest first
	// Seq of the point that is the newest state, if an older one was pushed after it; see Newest
	Latest  uint64 `json:"latest,omitempty"`
	Gone    bool   `json:"gone,omitempty"`   // removed: kept so that its epoch is not used again
	Fenced  []ID   `json:"fenced,omitempty"` // sessions that may not commit any more, the newest last
	Token   ID     `json:"token,omitzero"`   // of the last commit of the writer, who knows it; zero: not checked
	WriteID ID     `json:"write"`            // of this write, to know one's own
}

// SessionKind is what a session does.
type SessionKind string

const (
	Push SessionKind = "push"
	Pull SessionKind = "pull"

	// Repack is a prune that moves frames. It may commit to no head; its packs are not garbage while it is there.
	Repack SessionKind = "repack"
)

// Session says that somebody is at work: what it writes is not garbage, and what it
// pins stays. It is also the lease of who writes a volume, for people.
type Session struct {
	ID      ID          `json:"id"`
	Kind    SessionKind `json:"kind"`
	Heads   []string    `json:"heads"` // names of the volumes that it may commit to
	Writer  Writer      `json:"writer"`
	PID     int         `json:"pid"`
	Pins    []ID        `json:"pins,omitempty"` // manifests that must stay
	Beat    uint64      `json:"beat"`           // grows while it is alive
	Token   ID          `json:"token,omitzero"` // of this write: who knows it has written it; zero: not told
	Started time.Time   `json:"started"`        // by its own clock, for people only
	Renewed time.Time   `json:"renewed"`        // by its own clock, for people only

	lease lease // of the process whose session it is
}
