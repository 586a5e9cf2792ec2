package zfs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"
)

var (
	_ driver.Streamer = (*Driver)(nil)
	_ driver.Planner  = (*Driver)(nil)
	_ driver.Keyed    = (*Driver)(nil)
	_ driver.Comparer = (*Driver)(nil)
)

// A stream is the output of `zfs send`, in frames. They tell the end of a stream from
// a place where it was cut, and damage from a stream that ZFS rejects:
//
//	"pando zfs stream" and the version, u32
//	frames: length u32, not 0; CRC-32C u32; the bytes
//	the end: 0 u32; CRC-32C of all, u32; length of all, u64
//
// Numbers are little-endian.
const (
	streamMagic   = "pando zfs stream"
	streamVersion = 1
	maxFrame      = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// framer writes frames.
type framer struct {
	w   io.Writer
	crc uint32
	n   uint64
	err error // of w
}

func (f *framer) put(b []byte) error {
	if f.err == nil {
		_, f.err = f.w.Write(b)
	}
	return f.err
}

func (f *framer) begin() error {
	return f.put(binary.LittleEndian.AppendUint32([]byte(streamMagic), streamVersion))
}

func (f *framer) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		part := b[done:min(len(b), done+maxFrame)]
		head := binary.LittleEndian.AppendUint32(nil, uint32(len(part)))
		head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(part, castagnoli))
		if err := errors.Join(f.put(head), f.put(part)); err != nil {
			return done, f.err
		}
		f.crc = crc32.Update(f.crc, castagnoli, part)
		f.n += uint64(len(part))
		done += len(part)
	}

	return len(b), nil
}

func (f *framer) end() error {
	b := binary.LittleEndian.AppendUint32(nil, 0)
	b = binary.LittleEndian.AppendUint32(b, f.crc)
	return f.put(binary.LittleEndian.AppendUint64(b, f.n))
}

// unframer reads what a framer has written. It returns io.EOF only at the end of a
// complete stream.
type unframer struct {
	r     *bufio.Reader
	frame []byte // the unread rest of it
	buf   []byte
	crc   uint32
	n     uint64
	err   error
}

func damaged(format string, args ...any) error {
	return errs.New(errs.Damaged, "", "", "damaged stream: "+format, args...)
}

// full reads all of b.
func (u *unframer) full(b []byte) error {
	_, err := io.ReadFull(u.r, b)
	// An error of another kind comes from Pando's own code, and says more.
	if errs.IsAny(err, io.EOF, io.ErrUnexpectedEOF) && errs.KindOf(err) == errs.Internal {
		return damaged("it is cut short")
	}
	return err
}

func (u *unframer) begin() error {
	var head [len(streamMagic) + 4]byte
	if err := u.full(head[:]); err != nil {
		return err
	}

	if string(head[:len(streamMagic)]) != streamMagic {
		return damaged("it is not a stream of ZFS as Pando writes it")
	}

	if v := binary.LittleEndian.Uint32(head[len(streamMagic):]); v != streamVersion {
		return errs.New(errs.Unsupported, "", "", "the stream has version %d, but this pando supports version %d", v,
			streamVersion).WithHint("upgrade pando")
	}

	return nil
}

func (u *unframer) Read(b []byte) (int, error) {
	for len(u.frame) == 0 && u.err == nil {
		u.err = u.next()
	}
	if len(u.frame) == 0 {
		return 0, u.err
	}
	n := copy(b, u.frame)
	u.frame = u.frame[n:]
	return n, nil
}

// next reads a frame. At the end, which it checks, it returns io.EOF.
func (u *unframer) next() error {
	var head [8]byte
	if err := u.full(head[:]); err != nil {
		return err
	}

	n, crc := binary.LittleEndian.Uint32(head[:]), binary.LittleEndian.Uint32(head[4:])
	if n > maxFrame {
		return damaged("a piece of %d bytes", n)
	}

	if n == 0 {
		return u.finish(crc)
	}

	if u.buf == nil {
		u.buf = make([]byte, maxFrame)
	}

	frame := u.buf[:n]
	if err := u.full(frame); err != nil {
		return err
	}

	if crc32.Checksum(frame, castagnoli) != crc {
		return damaged("a checksum is wrong")
	}

	u.crc = crc32.Update(u.crc, castagnoli, frame)
	u.n += uint64(n)
	u.frame = frame
	return nil
}

// finish reads and checks the end of the stream: crc is its checksum of all frames.
func (u *unframer) finish(crc uint32) error {
	var total [8]byte
	if err := u.full(total[:]); err != nil {
		return err
	}
	if crc != u.crc || binary.LittleEndian.Uint64(total[:]) != u.n {
		return damaged("its end does not fit the rest")
	}
	if _, err := u.r.ReadByte(); err == nil {
		return damaged("there is more after its end")
	} else if err != io.EOF {
		return err
	}
	return io.EOF
}

// beginRecord is the content of the first record of a ZFS stream, struct drr_begin.
type beginRecord struct {
	kind     uint32 // of what was sent: DMU_OST_ZFS ...
	features uint64
	single   bool // one snapshot, not a package of several
	to, from uint64
}

const (
	beginBytes   = 312 // struct dmu_replay_record
	beginMagic   = 0x2F5bacbac
	beginType    = 0
	headSingle   = 1       // DMU_SUBSTREAM
	ostZFS       = 2       // DMU_OST_ZFS
	featureRaw   = 1 << 24 // DMU_BACKUP_FEATURE_RAW
	featureResum = 1 << 20 // DMU_BACKUP_FEATURE_RESUMING
)

func parseBegin(b []byte) (beginRecord, error) {
	var order binary.ByteOrder = binary.LittleEndian
	if order.Uint64(b[8:]) != beginMagic {
		order = binary.BigEndian
	}
	if order.Uint64(b[8:]) != beginMagic || order.Uint32(b) != beginType {
		return beginRecord{}, damaged("what is in it is not of ZFS")
	}

	info := order.Uint64(b[16:])
	return beginRecord{
		kind: order.Uint32(b[32:]), single: info&3 == headSingle, features: info >> 2 & (1<<30 - 1),
		to: order.Uint64(b[40:]), from: order.Uint64(b[48:]),
	}, nil
}

// immutableTree reads an object that can be sent, or that can be a base. NotFound, Invalid.
func (d *Driver) immutableTree(ctx context.Context, op string, id driver.ObjectID) (object, error) {
	o, err := d.readWhole(ctx, op, id, true)
	switch {
	case err != nil:
	case o.node.volume:
		err = errs.New(errs.Invalid, op, string(id), "it is a block image, not a tree")
	case !o.immutable:
		err = errs.New(errs.Invalid, op, string(id), "it is not immutable").WithHint("make a snapshot of it")
	}
	return o, err
}

// sendArgs returns the arguments of `zfs send` for an object. Blocks are sent compressed, as they are on disk, and
// those of an encrypted dataset encrypted, whether or not its key is loaded: a raw difference fits only a raw base.
func (d *Driver) sendArgs(o object, base driver.ObjectID) []string {
	args := []string{"-L", "-c"}
	if o.sentRaw() {
		args = []string{"-w"}
	}
	if base != "" {
		args = append(args, "-i", d.ownSnapName(base))
	}
	return append(args, d.ownSnapName(o.ID))
}

// sentRaw reports whether an object is sent raw. It never changes: a dataset is encrypted if and only if its origin is.
func (o object) sentRaw() bool { return o.node.encRoot != "" }

// Send implements driver.Streamer. ZFS accepts as a base only an object that from descends from.
func (d *Driver) Send(ctx context.Context, from, base driver.ObjectID, w io.Writer) error {
	const op = "send"
	if err := ctx.Err(); err != nil {
		return errs.Wrap(op, string(from), err)
	}

	o, err := d.immutableTree(ctx, op, from)
	if err != nil {
		return err
	}

	if base != "" {
		if base == from {
			return errs.New(errs.Invalid, op, string(from), "an object cannot be its own base")
		}
		if _, err := d.immutableTree(ctx, op, base); err != nil {
			return err
		}
	}

	f := &framer{w: w}
	if err := f.begin(); err != nil {
		return err
	}

	err = zfs.Send(ctx, d.sendArgs(o, base), f)
	switch {
	case f.err != nil:
		return f.err
	case zfs.Is(err, zfs.NotAncestor):
		e := errs.New(errs.Unsupported, op, string(from), "it does not descend from %s: %w", base, err)
		return e.WithHint("send it whole, or as the difference from an object that it was made from")
	case zfs.Is(err, zfs.Absent):
		d.memo.forget(from)
		return d.absentError(ctx, op, from)
	case err != nil:
		return err
	}

	// Write the end only after success: without it, the stream is invalid.
	return f.end()
}

// Same implements driver.Comparer: two objects are the same if no block was written after base, from which id must
// descend. Each change writes at least the root of the tree of blocks.
func (d *Driver) Same(ctx context.Context, id, base driver.ObjectID) (bool, error) {
	const op = "compare"
	for _, x := range []driver.ObjectID{id, base} {
		o, err := d.readWhole(ctx, op, x, false)
		if err != nil || !o.immutable {
			return false, err
		}
	}

	rows, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "written@"+d.ownSnapName(base), d.ownSnapName(id))
	if err != nil {
		return false, err
	}

	return len(rows) == 1 && rows[0][0] == "0", nil // "-" if it does not descend from it
}

// Receive implements driver.Streamer.
func (d *Driver) Receive(ctx context.Context, id driver.Identity, base driver.ObjectID, r io.Reader) error {
	const op = "receive"
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	if !id.Kind.Immutable() || id.FS.IsImage() {
		return errs.New(errs.Invalid, op, id.Ref(), "a %s %s cannot be received: only immutable trees can",
			id.FS, id.Kind)
	}

	id.SizeBytes, id.Sector = 0, 0
	prop, err := d.identityArg(id)
	if err != nil {
		return err
	}

	if err := d.checkVacant(ctx, id); err != nil {
		return err
	}

	// Check the base, and that the stream fits it.
	var on object
	var guid uint64
	if base != "" {
		if on, guid, err = d.receiveBase(ctx, base, id); err != nil {
			return err
		}
	}

	u := &unframer{r: bufio.NewReaderSize(r, maxFrame)}
	first, raw, err := d.firstRecord(u, guid)
	if err == nil && raw && base != "" && !on.sentRaw() {
		err = errs.New(errs.Conflict, "", "",
			"the stream is of an encrypted object, but its base is not encrypted here").
			WithHint("%s", rawHint)
	}
	if err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	// Receive the stream, and set the identity, which makes the object whole.
	args := []string{"-u", "-o", "readonly=on"}
	if base != "" {
		args = append(args, "-o", "origin="+d.ownSnapName(base))
	}
	if raw && base == "" || base != "" && on.node.ownKey {
		args = append(args, "-o", propKey+"="+keyOwn)
	}
	if d.step != nil {
		d.step([]string{"receive"})
	}

	err = zfs.Receive(ctx, append(args, d.ownSnapName(id.ID)), io.MultiReader(first, u))
	if raw && base != "" && zfs.Is(err, zfs.OtherKey) {
		err = errs.New(errs.Conflict, "", "",
			"the base of the stream was not received raw, as it was encrypted: %w", err).
			WithHint("%s", rawHint)
	}
	if err == nil && u.err != io.EOF {
		// ZFS stopped reading before the end: check the rest.
		_, err = io.Copy(io.Discard, u)
	}
	if err == nil {
		err = d.runChange(ctx, "set", prop, d.ownSnapName(id.ID))
	}
	if zfs.Is(err, zfs.Taken) { // since checkVacant
		return errs.New(errs.Exists, op, id.Ref(), "its dataset %s already exists", d.dataset(id.ID))
	}

	if err != nil {
		d.destroyAnyway(ctx, id.ID)
		return errs.Wrap(op, id.Ref(), err)
	}

	d.memo.forget(id.ID)
	return nil
}

// receiveBase reads the base of a stream to be received as id, and the GUID of its snapshot. NotFound, Invalid, or
// Permission if the base has another key than the pool.
func (d *Driver) receiveBase(
	ctx context.Context, base driver.ObjectID, id driver.Identity,
) (on object, guid uint64, err error) {
	const op = "receive"
	if on, err = d.immutableTree(ctx, op, base); err != nil {
		return on, 0, err
	}
	if err := d.sameKey(op, on, id); err != nil {
		return on, 0, err
	}
	guid, err = d.snapshotGUID(ctx, base)
	return on, guid, err
}

// rawHint tells how to get a base that fits a raw stream.
const rawHint = "receive what it builds upon from where the stream comes from, as it is encrypted there"

// Plan implements driver.Planner.
func (d *Driver) Plan(ctx context.Context, from, base driver.ObjectID) (driver.StreamPlan, error) {
	const op = "send"
	o, err := d.immutableTree(ctx, op, from)
	if err != nil {
		return driver.StreamPlan{}, err
	}

	p := driver.StreamPlan{Raw: o.sentRaw()}
	out, err := zfs.ZFS.Output(ctx, append([]string{"send", "-nP"}, d.sendArgs(o, base)...)...)
	if err != nil {
		return p, ctx.Err() // it is only an estimate
	}

	if p.Bytes = estimate(string(out)); p.Bytes > 0 {
		p.SavedBytes = min(p.Bytes, d.savedByZpool(ctx))
	}

	return p, ctx.Err()
}

// estimate finds the expected length of a stream in the output of `zfs send -nP`; 0 if it is not there.
func estimate(out string) int64 {
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "size" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err == nil && n > 0 {
				return n
			}
		}
	}
	return 0
}

// savedByZpool returns how much space block cloning and dedup save in the zpool, 0 if that is not known. ZFS counts it
// only for a zpool; it counts a dataset as if each of its blocks were stored for itself.
func (d *Driver) savedByZpool(ctx context.Context) int64 {
	rows, err := zfs.Zpool.Rows(ctx, 2, "get", "-Hp", "-o", "property,value", "all", d.zp)
	if err != nil {
		return 0
	}
	values := map[string]float64{}
	for _, r := range rows {
		if v, err := strconv.ParseFloat(strings.TrimSuffix(r[1], "x"), 64); err == nil {
			values[r[0]] = v
		}
	}
	return savedBytes(values)
}

// savedBytes computes the saved space from the properties of a zpool. For dedup there is only a ratio, over the data
// written with dedup on.
func savedBytes(of map[string]float64) int64 {
	return int64(of["bclonesaved"] + max(0, of["dedupratio"]-1)*of["allocated"])
}

// Key implements driver.Keyed.
func (d *Driver) Key(ctx context.Context, id driver.ObjectID) (driver.Key, error) {
	const op = "read key"
	o, err := d.readWhole(ctx, op, id, true)
	if err != nil || !o.sentRaw() {
		return driver.Key{}, err
	}
	rows, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "keystatus", d.dataset(id))
	if err != nil {
		return driver.Key{}, err
	}
	return driver.Key{Root: o.node.encRoot, Loaded: len(rows) == 1 && rows[0][0] == "available", Own: d.foreignKey(o)}, nil
}

// snapshotGUID returns the GUID by which ZFS identifies a snapshot, even where it was received.
func (d *Driver) snapshotGUID(ctx context.Context, id driver.ObjectID) (uint64, error) {
	out, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "guid", d.ownSnapName(id))
	if err != nil {
		return 0, err
	}
	if len(out) != 1 {
		return 0, errs.New(errs.Damaged, "receive", string(id), "it has %d GUIDs", len(out))
	}

	guid, err := strconv.ParseUint(out[0][0], 10, 64)
	if err != nil {
		return 0, &errs.Error{Kind: errs.Damaged, Op: "receive", Ref: string(id), Err: err}
	}

	return guid, nil
}

// firstRecord reads the first record of a stream, and returns a reader of that record.
// It refuses a stream that is not the difference from the snapshot with the GUID base,
// or, if base is 0, not a whole tree. raw reports whether the stream is encrypted.
func (d *Driver) firstRecord(u *unframer, base uint64) (first io.Reader, raw bool, err error) {
	if err := u.begin(); err != nil {
		return nil, false, err
	}

	head := make([]byte, beginBytes)
	if _, err := io.ReadFull(u, head); err != nil {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = damaged("it is cut short")
		}
		return nil, false, err
	}

	b, err := parseBegin(head)
	switch {
	case err != nil:
		return nil, false, err
	case !b.single, b.kind != ostZFS, b.features&featureResum != 0:
		// A package could bring other datasets and properties.
		return nil, false, errs.New(errs.Unsupported, "", "", "the stream is not a single tree as Pando sends it")
	case b.from != 0 && base == 0:
		return nil, false, errs.New(errs.Conflict, "", "", "the stream only holds the differences from another object").
			WithHint("receive that one first")
	case b.from == 0 && base != 0:
		return nil, false, errs.New(errs.Conflict, "", "",
			"the stream holds a whole object, not the differences from the given one")
	case b.from != base:
		return nil, false, errs.New(errs.Conflict, "", "",
			"the stream holds the differences from an object other than the given one").
			WithHint("its base is the snapshot with the GUID %d", b.from)
	}

	return bytes.NewReader(head), b.features&featureRaw != 0, nil
}
