package repo

import (
	"encoding/binary"
	"slices"
	"strings"
)

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

// checkExtensions checks the extensions.
func (m *Manifest) checkExtensions() error {
	if len(m.Extensions) > maxExtensions {
		return damaged("%d extensions are more than allowed", len(m.Extensions))
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

	return nil
}

func checkExtensionName(name string) error {
	if len(name) == 0 || len(name) > maxExtensionName ||
		strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789.-") != "" {
		return damaged("%q is not a valid extension name", name)
	}
	return nil
}

// appendExtensions encodes extensions.
func appendExtensions(b []byte, all []Extension) []byte {
	b = binary.AppendUvarint(b, uint64(len(all)))
	for _, x := range all {
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
	return b
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
