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

// IsDenied is isDenied.
func IsDenied(base string, err error) bool { return isDenied(base, err) }
