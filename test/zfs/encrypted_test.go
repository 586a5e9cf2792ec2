package zfs

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestEncrypted: in an encrypted dataset everything works while its key is loaded;
// a clone across keys is refused, and so is everything when the key is not there.
func TestEncrypted(t *testing.T) {
	h := newHostIn(t, 1<<30, func(h *host) {
		h.write(filepath.Join(h.tmp, "key"), "a passphrase of some length")
		h.dataset = h.zpool + "/secret/pando"
		h.zfs("create", "-o", "mountpoint=none", "-o", "encryption=on", "-o", "keyformat=passphrase",
			"-o", "keylocation=file://"+filepath.Join(h.tmp, "key"), h.zpool+"/secret")
	})
	src := filepath.Join(h.tmp, "src")
	h.write(filepath.Join(src, "a"), "plain")
	h.pando("golden", "import", "g", src, "--no-progress")
	h.pando("clone", "g", "v", "--mount")
	h.wantFile(filepath.Join(h.dir, "mnt/v/a"), "plain")
	if on := h.zfs("get", "-H", "-o", "value", "encryption",
		strings.TrimSpace(h.run("findmnt", "-n", "-o", "SOURCE",
			filepath.Join(h.dir, "mnt/v")))); strings.TrimSpace(on) == "off" {
		t.Error("a volume in an encrypted dataset is not encrypted")
	}
	h.pando("umount", "v")
	h.pando("flatten", "v")
	h.pando("mount", "v")
	h.wantFile(filepath.Join(h.dir, "mnt/v/a"), "plain")
	h.pando("umount", "v")

	// Somebody gives the volume a key of its own.
	var d struct{ ID string }
	h.json(&d, "show", "v")
	h.zfs("change-key", "-o", "keyformat=passphrase", "-o", "keylocation=file://"+filepath.Join(h.tmp, "key"),
		h.dataset+"/"+d.ID)
	h.fails(exitPermission, "zfs change-key -i", "fork", "v", "w")
	h.fails(exitPermission, "zfs change-key -i", "snapshot", "v")
	h.zfs("change-key", "-i", h.dataset+"/"+d.ID)
	h.pando("fork", "v", "w")

	// What an overlay changes has the pool's key, which must be that of its golden.
	h.json(&d, "show", "g@1")
	own := h.dataset + "/" + d.ID
	h.zfs("change-key", "-o", "keyformat=passphrase", "-o", "keylocation=file://"+filepath.Join(h.tmp, "key"), own)
	h.fails(exitUnsupported, "--overlay", "clone", "g", "o", "--overlay")
	h.zfs("change-key", "-i", own)

	// Without the key nothing can be used, and nothing is lost.
	h.zfs("unload-key", h.zpool+"/secret")
	h.fails(exitPermission, "zfs load-key", "mount", "v")
	h.zfs("load-key", h.zpool+"/secret")
	h.pando("mount", "v")
	h.wantFile(filepath.Join(h.dir, "mnt/v/a"), "plain")
	h.pando("destroy", "v", "w")
}
