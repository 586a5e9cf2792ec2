package zfs

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestRemote carries volumes from ZFS to a pool of image files and back, and datasets
// from ZFS to ZFS.
func TestRemote(t *testing.T) {
	h := newHost(t, 2<<30)
	src, repository := filepath.Join(h.tmp, "src"), "file:"+filepath.Join(h.tmp, "repository")
	big := noise(t, 2<<20)
	h.write(filepath.Join(src, "big"), big)
	h.pando("golden", "import", "g", src, "--fs", "ext4", "--size", "64M", "--no-progress")
	h.pando("clone", "g", "v", "--mount")
	h.pando("remote", "add", "r", repository)
	h.write(filepath.Join(h.dir, "mnt/v/own"), "first")
	h.pando("push", "v", "--no-progress")
	h.write(filepath.Join(h.dir, "mnt/v/own"), "second")
	// No map says what has changed in a zvol: all of it is read, and little is sent.
	if out := h.pando("push", "v", "--json"); !strings.Contains(out, `"full": true`) &&
		!strings.Contains(out, `"full":true`) {
		t.Errorf("push: %s", out)
	}

	// The other pool has images in files.
	o := &host{t: t, dir: filepath.Join(h.tmp, "other"), tmp: h.tmp}
	o.pando("init", "--size", "1G", "-q")
	t.Cleanup(func() { o.pando("deinit", "--force", "--lose-keys", "-q") })
	o.pando("remote", "add", "r", repository, "--identity", filepath.Join(h.dir, "remotes/r/identity"))
	o.pando("pull", "r", "v", "--mount", "--no-progress")
	o.wantFile(filepath.Join(o.dir, "mnt/v/big"), big)
	o.wantFile(filepath.Join(o.dir, "mnt/v/own"), "second")
	o.write(filepath.Join(o.dir, "mnt/v/own"), "third")
	o.pando("push", "v", "--as", "w", "--no-progress")

	h.pando("pull", "r", "w", "--mount", "--no-progress")
	h.wantFile(filepath.Join(h.dir, "mnt/w/big"), big)
	h.wantFile(filepath.Join(h.dir, "mnt/w/own"), "third")
	if out := h.pando("verify", "r", "--read-data"); !strings.Contains(out, "none") {
		t.Errorf("verify: %s", out)
	}

	h.pando("golden", "import", "n", src, "--no-progress")
	h.pando("clone", "n", "d", "--mount")
	h.pando("push", "d", "--no-progress")
	h.write(filepath.Join(h.dir, "mnt/d/own"), "of a dataset")
	h.pando("push", "d", "--no-progress")
	z := &host{t: t, dir: filepath.Join(h.tmp, "third"), tmp: h.tmp}
	z.pando("init", "--zfs-dataset", h.zpool+"/third", "-q")
	t.Cleanup(func() { z.pando("deinit", "--force", "--lose-keys", "-q") })
	z.pando("remote", "add", "r", repository, "--identity", filepath.Join(h.dir, "remotes/r/identity"))
	z.pando("pull", "r", "d", "--mount", "--no-progress")
	z.wantFile(filepath.Join(z.dir, "mnt/d/big"), big)
	z.wantFile(filepath.Join(z.dir, "mnt/d/own"), "of a dataset")
}
