package model

import (
	"archive/tar"
	"bytes"
	"io"
	"maps"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// resize enlarges a volume a little, or tries to.
func (m *model) resize(v string, vol *volume) {
	before, err := m.e.Show(m.t.Context(), ref.Ref{Name: v})
	m.must(err)
	size := before.SizeBytes + (1+m.r.Int64N(4))<<20
	if shrink := m.r.IntN(4) == 0; shrink {
		size = max(before.SizeBytes-1<<20, 1)
	}

	m.note("resize", "%s from %d to %d", v, before.SizeBytes, size)
	out, err := m.e.Resize(m.t.Context(), engine.ResizeRequest{Volume: ref.MustName(v), SizeBytes: size})
	image := driver.FS(before.FS).IsImage()
	switch {
	case vol.overlay, !image, m.e.Caps().Name == "zfs" && size >= before.SizeBytes:
		m.refused(errs.Unsupported, err)
	case size < before.SizeBytes:
		m.refused(errs.Invalid, err)
	case vol.mounted && before.FS == "ext4" && !kernel.Capable(unix.CAP_SYS_RESOURCE):
		m.refused(errs.Permission, err)
	default:
		m.must(err)
		if out.SizeBytes != size || out.BeforeBytes != before.SizeBytes {
			m.errorf("resized %s to %d: %+v", v, size, out)
		}
	}
}

// export exports a volume as an archive, which must have its files.
func (m *model) export(v string, vol *volume) {
	m.note("export", "%s mounted=%v overlay=%v", v, vol.mounted, vol.overlay)
	var b bytes.Buffer
	_, err := m.e.ExportStream(m.t.Context(), engine.ExportRequest{From: ref.Ref{Name: v}, Format: engine.ExportTar}, &b)
	if vol.overlay && vol.mounted && !m.atomic {
		m.refused(errs.InUse, err)
		return
	}

	m.must(err)
	got := content{}
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		m.must(err)
		if err != nil {
			return
		}
		if h.Typeflag == tar.TypeReg {
			all, err := io.ReadAll(r)
			m.must(err)
			got[h.Name] = string(all)
		}
	}

	if !maps.Equal(got, vol.content) {
		m.errorf("the archive of %s has %v, wanted %v", v, sorted(got), sorted(vol.content))
	}
}
