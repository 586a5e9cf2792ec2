package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/durable"
	"pando/internal/linux/treewalk"
)

// variant is one way to give sessions copies of the tree.
type variant interface {
	name() string
	// prepare makes what all copies need, once. Unsupported, or an errCopy: this host cannot do it.
	prepare(ctx context.Context) error
	// setup makes n copies, and returns where they are. Errors as of prepare.
	setup(ctx context.Context, n int) ([]string, error)
	// remove removes all copies that setup has made, even if that failed.
	remove(ctx context.Context) error
	// meter is of the devices that copies are read from.
	meter() *meter
}

func (d *density) variants() []variant {
	return []variant{
		&bareOverlays{density: d},
		&pandoClones{density: d, overlay: true},
		&pandoClones{density: d},
		&reflinkCopies{density: d},
		&containers{density: d},
	}
}

// bareOverlays are mounts of overlayfs on the golden, made by nothing but system calls: the floor of overlay clones.
type bareOverlays struct {
	*density
	f     floor
	upper *driver.Attachment
	made  int
}

func (b *bareOverlays) name() string  { return DensityBare }
func (b *bareOverlays) meter() *meter { return b.run.meter }

func (b *bareOverlays) prepare(ctx context.Context) error {
	if b.upper != nil {
		return nil
	}
	upper, err := b.emptyUpper(ctx)
	b.upper = &upper
	return err
}

func (b *bareOverlays) setup(ctx context.Context, n int) (dirs []string, err error) {
	if b.f, err = newOverlayFloor(ctx, b.att, *b.upper, filepath.Join(b.scratch.inner, imagesName),
		b.scratch.outer); err != nil {
		return nil, &errCopy{err.Error()}
	}

	for i := range n {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := b.f.clone(ctx, i, func(string) {}); err != nil {
			return nil, err
		}
		b.made++
		dirs = append(dirs, filepath.Join(b.scratch.outer, mountsName, itoa(i)))
	}

	return dirs, nil
}

func (b *bareOverlays) remove(ctx context.Context) error {
	if b.f == nil {
		return nil
	}

	var all []error
	for ; b.made > 0; b.made-- {
		all = append(all, b.f.destroy(b.made-1), b.f.forget(ctx, b.made-1))
		b.f.sweep(b.made - 1)
	}

	b.f.close()
	b.f = nil
	for _, suffix := range []string{"", "-wal", "-shm"} {
		_ = os.Remove(filepath.Join(b.scratch.outer, "floor.db"+suffix)) // if it stays, the next setup fails
	}

	return errors.Join(all...)
}

// pandoClones are volumes.
type pandoClones struct {
	*density
	overlay bool
	names   []string
	next    int
}

func (p *pandoClones) name() string {
	if p.overlay {
		return DensityOverlay
	}
	return DensityClone
}

func (p *pandoClones) meter() *meter { return p.run.meter }

func (p *pandoClones) prepare(context.Context) error { return nil }

func (p *pandoClones) setup(ctx context.Context, n int) (dirs []string, err error) {
	p.next++
	infos, err := p.eng.Clone(ctx, engine.CloneRequest{From: p.golden, Count: n, Mount: true, Overlay: p.overlay,
		Name: ref.MustName(p.run.name(p.name() + itoa(p.next)))})
	for _, v := range infos {
		p.names, dirs = append(p.names, v.Name), append(dirs, v.Mountpoint)
	}
	return dirs, err
}

func (p *pandoClones) remove(ctx context.Context) error {
	if len(p.names) == 0 {
		return nil
	}
	err := p.destroy(ctx, p.names...)
	p.names = nil
	return err
}

// reflinkCopies are copies by cp, file by file, that share their data on the disk.
type reflinkCopies struct {
	*density
	made []string
}

func (c *reflinkCopies) name() string  { return DensityReflink }
func (c *reflinkCopies) meter() *meter { return c.run.meter }

// prepare copies the tree into the pool's filesystem, which reflinks cannot leave.
func (c *reflinkCopies) prepare(ctx context.Context) error {
	if c.copyDir != "" {
		return nil
	}
	to := filepath.Join(c.scratch.inner, "copy")
	_, err := c.cp(ctx, "never", c.source, to)
	if err == nil {
		c.copyDir = to
	}
	return err
}

func (c *reflinkCopies) setup(ctx context.Context, n int) ([]string, error) {
	for i := range n {
		to := filepath.Join(c.scratch.inner, "reflink-"+itoa(i))
		c.made = append(c.made, to)
		if _, err := c.cp(ctx, "always", c.copyDir, to); err != nil {
			return nil, err
		}
	}

	return c.made, durable.SyncFS(c.scratch.inner)
}

func (c *reflinkCopies) remove(ctx context.Context) error {
	var all []error
	for _, dir := range c.made {
		all = append(all, treewalk.Remove(ctx, dir))
	}
	c.made = nil
	return errors.Join(all...)
}
