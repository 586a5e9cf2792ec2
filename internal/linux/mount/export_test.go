package mount

import "context"

// ReadLivingTables is ReadTables as on kernels that do not list namespaces.
func ReadLivingTables(ctx context.Context) (*Tables, error) {
	t, err := newTables()
	if err == nil {
		t.readLiving(ctx)
	}
	return t, err
}

// OverlayInNamespace is Overlay.Mount as older kernels need it.
func OverlayInNamespace(o Overlay) (*Detached, error) { return o.inNamespace() }

// CopyInNamespace is Detached.Copy as older kernels need it.
func CopyInNamespace(d *Detached) (*Detached, error) { return d.copyInNamespace() }
