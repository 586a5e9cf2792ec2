package zfs_test

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"
)

// streams as drivertest does not make them.
func TestStreams(t *testing.T) {
	zpool := newZpool(t, 1<<30)
	p := newPool(t, zpool+"/streams")
	a, b := p.create(driver.Native), p.create(driver.Native)
	sa, sb := p.snapshot(a, driver.Native), p.snapshot(b, driver.Native)
	if err := p.d.Send(p.ctx(), sa, sb, io.Discard); !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
		t.Errorf("the difference of two that have nothing to do with each other: %v with hint %q", err, errs.HintOf(err))
	}
	image := p.snapshot(p.create(driver.None), driver.None)
	if err := p.d.Send(p.ctx(), image, "", io.Discard); !errs.Is(err, errs.Invalid) {
		t.Errorf("send of a block image: %v", err)
	}

	// Packages of several datasets, and what is no filesystem, in good frames.
	own := func(id driver.ObjectID) string { return p.root + "/" + string(id) + "@" + string(id) }
	whole, _ := p.list()
	for what, args := range map[string][]string{
		"a package":                {"-R", own(sa)},
		"one with properties":      {"-p", own(sa)},
		"a block image":            {own(image)},
		"what is not sent by name": {"-L", own(image)},
	} {
		var raw, framed bytes.Buffer
		if err := zfs.Send(t.Context(), args, &raw); err != nil {
			t.Fatal(err)
		}
		framed.Write(p.frames(raw.Bytes()))
		id := identity(driver.Snapshot, driver.Native)
		if err := p.d.Receive(p.ctx(), id, "", &framed); !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: %v of kind %q", what, err, errs.KindOf(err))
		}
	}
	// Damage that only ZFS can see, and what follows its end.
	var raw bytes.Buffer
	if err := zfs.Send(t.Context(), []string{own(sa)}, &raw); err != nil {
		t.Fatal(err)
	}
	for what, bad := range map[string][]byte{
		"cut":           raw.Bytes()[:raw.Len()/2],
		"only a record": raw.Bytes()[:312],
		"less":          raw.Bytes()[:100],
		"nothing":       nil,
		"text":          []byte(strings.Repeat("text ", 100)),
		"changed": func() []byte {
			b := bytes.Clone(raw.Bytes())
			b[len(b)*2/3] ^= 1
			return b
		}(),
		"a lot more": append(bytes.Clone(raw.Bytes()), make([]byte, 5<<20)...),
	} {
		id := identity(driver.Snapshot, driver.Native)
		if err := p.d.Receive(p.ctx(), id, "", bytes.NewReader(p.frames(bad))); !errs.Is(err, errs.Damaged) {
			t.Errorf("%s: %v of kind %q", what, err, errs.KindOf(err))
		}
	}
	if w, half := p.list(); len(w) != len(whole) || len(half) != 0 {
		t.Errorf("after what was refused there is %q, half %q; before %q", w, half, whole)
	}
	id := identity(driver.Snapshot, driver.Native)
	if err := p.d.Receive(p.ctx(), id, "", bytes.NewReader(p.frames(raw.Bytes()))); err != nil {
		t.Errorf("a good one: %v", err)
	}
}

// frames puts a stream of ZFS into frames, as the driver does.
func (p *pool) frames(b []byte) []byte {
	p.t.Helper()
	out, err := p.d.Frames(b)
	p.must(err)
	return out
}
