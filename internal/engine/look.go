package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
)

// View is what Look reports about a pool.
type View struct {
	Dir     string // absolute
	Driver  string
	Loop    bool   // it is in a file of its own
	Data    string // directory or mount point of its objects
	Goldens []ViewImage
	// Attached maps the paths of images that are attached to block devices now to the
	// names of their objects, and Mounts does the same for mount points.
	Attached map[string]string
	Mounts   map[string]string
	// Ephemeral has the IDs of ephemeral volumes, and their mount points, "" if they are not mounted.
	Ephemeral map[string]string
	// Working is the number of objects that commands are working on now: devices and
	// mounts that these use are in neither map.
	Working int
	// Trouble is why the maps are empty, or nil if they are right: Damaged, TooNew,
	// Permission, or Unsupported (the pool is not mounted, or must be upgraded).
	Trouble error
}

// ViewImage is the current generation of a golden.
type ViewImage struct {
	Ref   string // "web@3"
	Image string // path of its image, or of its tree
	Tree  bool   // Image is a directory
}

// Look reports what a pool is and contains without changing it: it cleans up, mounts
// and upgrades nothing, and reports damage in View.Trouble. NotFound if there is no
// pool; Damaged, TooNew or Permission if its configuration cannot be read.
func Look(ctx context.Context, dir string, drivers Drivers) (*View, error) {
	p, err := pool.Read(dir)
	if err != nil {
		return nil, err
	}

	v := &View{Dir: p.Dir, Driver: p.Config.Driver, Loop: p.Config.Backing != nil, Data: p.DataDir(),
		Attached: map[string]string{}, Mounts: map[string]string{}, Ephemeral: map[string]string{}}
	e, err := openPool(ctx, p, drivers, ReadOnly)
	if err == nil {
		err = v.readCatalog(ctx, e)
		e.Close()
	}

	v.Trouble = err
	if ctx.Err() != nil {
		return nil, errs.Wrap("look", dir, ctx.Err())
	}

	return v, nil
}

// readCatalog fills the fields that come from the catalogue.
func (v *View) readCatalog(ctx context.Context, e *Engine) error {
	// Read the marks first: what their operations record afterwards is in the rows.
	var current []catalog.Row
	names := map[driver.ObjectID]string{}
	var attached map[driver.ObjectID]catalog.MountRecord
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		marks, err := tx.Marks()
		if err != nil {
			return err
		}

		v.Working = len(marks)
		if attached, err = tx.MountRecords(); err != nil {
			return err
		}

		if err := tx.Rows("", func(r catalog.Row) error {
			if _, ok := attached[r.ID]; ok {
				names[r.ID] = r.Ref()
			}
			if r.Ephemeral && r.Kind == driver.Volume {
				v.Ephemeral[string(r.ID)] = ""
			}
			return nil
		}); err != nil {
			return err
		}

		current, err = currentGenerations(tx)
		return err
	}); err != nil {
		return err
	}

	if err := v.addGoldens(ctx, e, current); err != nil {
		return err
	}

	for id, a := range attached {
		v.addAttached(ctx, e, id, cmp.Or(names[id], string(id)), a.Mountpoint)
	}

	return nil
}

// currentGenerations returns the current generation of each golden.
func currentGenerations(tx *catalog.Tx) ([]catalog.Row, error) {
	goldens, err := tx.Goldens()
	if err != nil {
		return nil, err
	}

	var out []catalog.Row
	for _, g := range goldens {
		r, ok, err := tx.Generation(g.Name, g.Current)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, r)
		}
	}

	return out, nil
}

// addGoldens adds the current generations of goldens, with the paths of their content.
func (v *View) addGoldens(ctx context.Context, e *Engine, current []catalog.Row) error {
	for _, r := range current {
		w, err := e.drv.Attachment(ctx, r.ID)
		if err != nil {
			return err
		}
		g := ViewImage{Ref: fmt.Sprintf("%s@%d", r.Golden, r.Generation), Image: w.Image}
		if w.Tree != "" {
			g.Image, g.Tree = w.Tree, true
		}
		if w.Block {
			g.Image = "" // a device that exists while it is in use; its blocks are elsewhere
		}
		v.Goldens = append(v.Goldens, g)
	}

	return nil
}

// addAttached adds the image of an attached object and its mount point, if it has one, under the object's name.
func (v *View) addAttached(ctx context.Context, e *Engine, id driver.ObjectID, name, point string) {
	w, err := e.drv.Attachment(ctx, id)
	if err == nil && w.Image != "" && !w.Block {
		v.Attached[w.Image] = name
	}
	if point == "" {
		return
	}

	// Mount points of raw volumes are symbolic links to devices.
	if fi, err := os.Lstat(point); err == nil && fi.Mode()&fs.ModeSymlink == 0 {
		if real, err := filepath.EvalSymlinks(point); err == nil {
			point = real
		}
	} else if errors.Is(err, fs.ErrNotExist) {
		return
	}

	v.Mounts[point] = name
	if _, ok := v.Ephemeral[string(id)]; ok {
		v.Ephemeral[string(id)] = point
	}
}
