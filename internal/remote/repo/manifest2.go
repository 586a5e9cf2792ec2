package repo

import (
	"encoding/binary"
	"slices"
	"strings"

	"pando/internal/base/errs"
)

// A manifest of version 2 has the root of a map instead of pages. It lists only the segments that it names itself and
// those that its session wrote, so its size does not grow with the volume or its history.

// Limits of extensions.
const (
	maxExtensions     = 256
	maxExtensionName  = 64
	maxExtensionBytes = 1 << 20 // of all of them
)

// overlayExtension marks the manifest of an overlay. It is critical, because programs that do not know it would take
// the upper layer of an overlay for the files of a volume, and would delete the lower layer.
const overlayExtension = "overlay"

// knownExtensions lists the extensions that this package supports.
var knownExtensions = map[string]bool{overlayExtension: true}

// MarkOverlay makes m the manifest of an overlay: its content holds only the changes to its Origin, which must stay as
// long as m.
func (m *Manifest) MarkOverlay() {
	m.Version = 2
	m.Extensions = append(m.Extensions, Extension{Name: overlayExtension, Critical: true})
}

// IsOverlay reports whether the content of m holds only the changes to its Origin.
func (m *Manifest) IsOverlay() bool {
	return slices.ContainsFunc(m.Extensions, func(x Extension) bool { return x.Name == overlayExtension })
}

// Needs returns the manifests without which nothing can be restored from m: those that its stream is the difference
// from, and that it is an overlay on. These need others in turn.
func (m *Manifest) Needs() (out []ID) {
	if m.Content.Chained() && !m.Parent.IsZero() {
		out = append(out, m.Parent)
	}
	if m.IsOverlay() {
		out = append(out, m.Origin.Manifest)
	}
	return out
}

// checkOverlay checks what the manifest of an overlay must have.
func (m *Manifest) checkOverlay() error {
	i := slices.IndexFunc(m.Extensions, func(x Extension) bool { return x.Name == overlayExtension })
	switch {
	case i < 0:
		return nil
	case !m.Extensions[i].Critical || len(m.Extensions[i].Data) > 0:
		return damaged("extension %q is not as this version knows it", overlayExtension)
	case m.Origin == nil || m.Origin.Manifest.IsZero() || m.Origin.Manifest == m.ID:
		return damaged("it is an overlay, but names no origin that it is an overlay on")
	}
	return checkName(m.Origin.Volume)
}

// checkVersion checks the fields that exist in only one of the versions.
func (m *Manifest) checkVersion() error {
	switch {
	case m.Version < 0 || m.Version > manifestVersion:
		return damaged("unknown version %d", m.Version)
	case m.Version < 2 && (m.Map != NodeRef{} || len(m.Extensions) > 0):
		return damaged("it has a map or extensions, which version 1 does not allow")
	case m.Version < 2:
		return nil
	case len(m.Pages) > 0:
		return damaged("it has pages, which version 2 does not allow")
	case len(m.Extensions) > maxExtensions:
		return damaged("%d extensions are more than allowed", len(m.Extensions))
	}

	for _, u := range m.Uses {
		if u.Size > MaxSegment {
			return damaged("segment %s declares %d bytes", u.Segment, u.Size)
		}
	}

	total := 0
	for i, x := range m.Extensions {
		if err := checkExtensionName(x.Name); err != nil {
			return err
		}
		if i > 0 && m.Extensions[i-1].Name >= x.Name {
			return damaged("the extensions are out of order")
		}
		if total += len(x.Data); total > maxExtensionBytes {
			return damaged("the extensions exceed %d bytes", maxExtensionBytes)
		}
	}

	return m.checkOverlay()
}

func checkExtensionName(name string) error {
	if len(name) == 0 || len(name) > maxExtensionName ||
		strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789.-") != "" {
		return damaged("%q is not a valid extension name", name)
	}
	return nil
}

// encode2 encodes the content of a manifest of version 2.
func (m *Manifest) encode2() ([]byte, error) {
	b, table, err := m.encodeHead()
	if err != nil {
		return nil, err
	}

	// Write the root of the map, and the frames of the stream.
	last := looseFrame{offset: headerSize}
	if m.Map == (NodeRef{}) {
		b = append(b, 0)
	} else {
		b = append(b, 1)
		b = appendNodeRef(b, table, &last, m.Map)
	}

	b = last.appendStream(b, table, m.Stream)

	// Write the extensions.
	b = binary.AppendUvarint(b, uint64(len(m.Extensions)))
	for _, x := range m.Extensions {
		critical := byte(0)
		if x.Critical {
			critical = 1
		}
		b = binary.AppendUvarint(b, uint64(len(x.Name)))
		b = append(b, x.Name...)
		b = append(b, critical)
		b = binary.AppendUvarint(b, uint64(len(x.Data)))
		b = append(b, x.Data...)
	}

	return b, nil
}

// decodeManifest2 decodes a manifest of version 2, and checks it. Damaged, TooNew.
func decodeManifest2(b []byte) (Manifest, error) {
	r := &reader{b: b}
	m, err := r.manifestFields()
	if err != nil {
		return Manifest{}, err
	}

	m.Version, m.Sizes = 2, nil

	// Decode the segments with their sizes, of which each takes at least a byte.
	segments := r.segmentTable(maxUses)
	if r.err == nil && len(segments) > len(r.b) {
		r.fail("truncated in the sizes of %d segments", len(segments))
	}
	if r.err != nil {
		return Manifest{}, r.err
	}

	for _, s := range segments {
		m.Uses = append(m.Uses, Use{Segment: s, Size: uint32(r.uvarint("the bytes of a segment", MaxSegment))})
	}

	// Decode the root of the map, and the frames of the stream.
	last := looseFrame{offset: headerSize}
	switch r.uvarint("whether it has a map", 1) {
	case 1:
		m.Map = r.nodeRef(segments, &last, nil)
	}

	m.Stream = r.stream(&last, segments)

	// Decode the extensions. An unknown one counts only if the rest is not damaged.
	unknown := r.extensions(&m)
	if err := r.finish(); err != nil {
		return Manifest{}, err
	}

	if err := m.check(); err != nil {
		return Manifest{}, err
	}

	if unknown != "" {
		return Manifest{}, errs.New(errs.TooNew, "", "", "it needs extension %q, which this pando does not support", unknown).
			WithHint("upgrade pando")
	}

	return m, nil
}

// extensions decodes the extensions, and returns the name of the first critical one that this package does not support.
func (r *reader) extensions(m *Manifest) (unknown string) {
	count := r.count("extensions", 3)
	if count > maxExtensions {
		r.fail("%d extensions are more than allowed", count)
	}

	for range count {
		if r.err != nil {
			return ""
		}

		name := r.nextBytes("an extension's name", int(r.uvarint("the length of a name", maxExtensionName)))
		flags := r.nextBytes("an extension's flags", 1)
		data := r.nextBytes("an extension", int(r.uvarint("the length of an extension", maxExtensionBytes)))
		if r.err != nil {
			return ""
		}
		if flags[0] > 1 {
			r.fail("an extension has unknown flags %d", flags[0])
		}

		x := Extension{Name: string(name), Critical: flags[0] == 1, Data: slices.Clone(data)}
		if x.Critical && !knownExtensions[x.Name] && unknown == "" {
			unknown = x.Name
		}

		m.Extensions = append(m.Extensions, x)
	}

	return unknown
}
