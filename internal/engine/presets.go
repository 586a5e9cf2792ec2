package engine

import (
	"context"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/content"
	"pando/internal/engine/preset"

	"golang.org/x/sys/unix"
)

// A preset's rules are applied to the scratch volume that becomes a generation: never to the source, and never to
// clones, which so stay as cheap as others.

// Presets lists the names of the presets that are part of the program.
func Presets() []string { return preset.Names() }

// loadPreset reads the preset of a golden, and sets the golden's policy for overlays as it says. It returns nil without
// a preset. Invalid, NotFound.
func loadPreset(op, golden, name string, overlay **driver.OverlayPolicy) (*preset.Rules, error) {
	if name == "" {
		return nil, nil
	}

	r, err := preset.Load(name)
	if err != nil {
		return nil, err
	}

	if r.Overlay == driver.OverlayAllowed {
		return r, nil
	}

	if *overlay != nil && **overlay != r.Overlay {
		return nil, errs.New(errs.Invalid, op, golden, "preset %s needs overlay=%s (got %s)", name, r.Overlay, **overlay).
			WithHint("remove %s", errs.Param("overlay"))
	}

	*overlay = &r.Overlay
	return r, nil
}

// checkPreset loads the preset of an import, and refuses a source that it does not fit. It returns InUse if its
// owner runs, and Invalid.
func (q *importing) checkPreset() (err error) {
	src := q.src
	if src.preset, err = loadPreset(opImport, q.Name.String(), q.Preset, &q.Overlay); err != nil || src.preset == nil {
		return err
	}

	if q.Replace {
		return errs.New(errs.Invalid, opImport, q.Source, "a preset leaves out files that the directory would lose").
			WithHint("remove %s, or remove %s", errs.Param("replace"), errs.Param("preset"))
	}

	if q.FS == driver.None {
		return errs.New(errs.Invalid, opImport, q.Source, "a raw volume has no files that a preset could leave out").
			WithHint("remove %s", errs.Param("preset"))
	}

	return src.checkUnused(q.Source)
}

// checkUnused refuses a directory whose owner, by the rules of its preset, runs. InUse, Invalid.
func (s *source) checkUnused(name string) error {
	if s.preset == nil || s.kind != SourceDirectory {
		return nil
	}

	root, err := os.Open(s.path)
	if err != nil {
		return errs.Wrap(opImport, name, err)
	}

	defer root.Close()
	if err := s.preset.CheckKind(opImport, name, root); err != nil {
		return err
	}
	return s.preset.CheckUnused(opImport, name, root, s.path)
}

// checkOwner refuses a volume whose owner, by the rules of the build's preset, runs. InUse, Invalid.
func (b *build) checkOwner(ctx context.Context) error {
	vol := b.reads.Row
	if b.preset == nil {
		return nil
	}

	if vol.FS == driver.None {
		return errs.New(errs.Invalid, b.op, vol.Name, "a raw volume has no files that a preset could leave out").
			WithHint("remove %s", errs.Param("preset"))
	}

	return b.e.content.WithMounted(ctx, b.reads, func(root *os.File) error {
		return b.preset.CheckUnused(b.op, vol.Name, root, b.reads.Record.Mountpoint)
	})
}

// clean applies the rules of a build's preset to the tree of its scratch volume, and returns what it removed.
func (b *build) clean(ctx context.Context, root *os.File) ([]string, error) {
	if b.preset == nil {
		return nil, nil
	}

	if err := b.preset.CheckKind(b.op, b.golden.Name, root); err != nil {
		return nil, err
	}

	removed, err := b.preset.Clean(ctx, root)
	if err != nil || len(removed) == 0 || !b.scratch.FS.IsImage() {
		return removed, err
	}

	// The filesystem frees the blocks when its log is written. Without trimming, their data would stay in the image.
	if err := unix.Syncfs(int(root.Fd())); err != nil {
		return removed, errs.Wrap(b.op, b.golden.Name, err)
	}

	content.Trim("/proc/self/fd/" + itoa(int(root.Fd())))
	return removed, nil
}

// cleanScratch is clean for a scratch volume that is not mounted.
func (b *build) cleanScratch(ctx context.Context) (removed []string, err error) {
	if b.preset == nil {
		return nil, nil
	}

	clean := func(root *os.File) error {
		removed, err = b.clean(ctx, root)
		return err
	}

	if !b.scratch.FS.IsImage() {
		err = b.e.content.WithTree(ctx, b.scratch.ID, false, clean)
		return removed, err
	}

	// The object of an imported image does not know yet which filesystem is in it.
	err = b.e.content.WithImage(ctx, b.scratch.ID, content.ImageOptions{FS: b.scratch.FS}, clean)
	return removed, err
}
