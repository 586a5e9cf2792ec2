package mcp

import (
	"context"
	"path"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// volume returns the name of a volume that a client may name: one with the prefix. Whether others exist, it does not
// learn. Invalid, Permission.
func (s *Server) volume(op, text string) (ref.Name, error) {
	name, err := ref.ParseName(op, text)
	if err == nil && !strings.HasPrefix(text, s.o.Prefix) {
		err = errs.New(errs.Permission, op, text, "names of volumes must begin with %s here", s.o.Prefix).
			WithHint("use for example %s%s", s.o.Prefix, strings.TrimLeft(text, "-"))
	}
	return name, err
}

// own returns the name of a volume that a client may change: one that this server has made. Invalid, Permission,
// NotFound.
func (s *Server) own(ctx context.Context, op, text string) (ref.Name, error) {
	name, err := s.volume(op, text)
	if err != nil || s.o.AllowDestroy {
		return name, err
	}

	labels, err := s.pool.Labels(ctx, name.Ref())
	if err == nil && !s.isMine(labels) {
		err = errs.New(errs.Permission, op, text, "this server has not made this volume").
			WithHint("clone it, and work in the clone")
	}
	return name, err
}

// isMine reports whether what has these labels was made by this server.
func (s *Server) isMine(l driver.Labels) bool { return l.Map()[Label] == s.session }

// labels are those of everything that the server makes.
func (s *Server) labels() (driver.Labels, error) {
	return driver.NewLabels(opMCP, map[string]string{Label: s.session})
}

// mine selects what the server has made.
func (s *Server) mine() (driver.LabelSelector, error) {
	return driver.ParseLabelSelector(opMCP, Label+"="+s.session)
}

// source returns a reference to what a client may read: a golden that was allowed or that it has published, or a volume
// or snapshot with the prefix. Invalid, Permission, NotFound.
func (s *Server) source(ctx context.Context, op, text string) (ref.Ref, error) {
	r, err := ref.Parse(op, text)
	if err != nil {
		return r, err
	}

	golden, volume := s.mayClone(r.Name), strings.HasPrefix(r.Name, s.o.Prefix)
	refused := errs.New(errs.Permission, op, text, "it is neither a golden nor a volume that this server may use").
		WithHint("see what there is with the tool list")
	if !golden && !volume {
		return r, refused
	}

	// A volume may have a name like those of the goldens, and a golden one with the prefix.
	d, err := s.pool.Show(ctx, ref.Ref{Name: r.Name})
	if isVolume := d.Kind == string(driver.Volume); err == nil && !(isVolume && volume || !isVolume && golden) {
		err = refused
	}
	return r, err
}

// mayClone reports whether a golden may be cloned.
func (s *Server) mayClone(golden string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return matches(s.o.Goldens, golden) || slices.ContainsFunc(s.published, func(p string) bool {
		name, _, _ := strings.Cut(p, "@")
		return name == golden
	})
}

// matches reports whether a name matches one of the globs.
func matches(globs []string, name string) bool {
	return slices.ContainsFunc(globs, func(g string) bool {
		ok, _ := path.Match(g, name) // New has checked the globs
		return ok
	})
}

// shown is an origin, unless it has a name that the client may not see.
func (s *Server) shown(origin string) string {
	name, _, _ := strings.Cut(origin, "@")
	if s.mayClone(name) || strings.HasPrefix(name, s.o.Prefix) {
		return origin
	}
	return ""
}

// seen lists the volumes that a client may see.
func (s *Server) seen(ctx context.Context) ([]engine.Info, error) {
	all, err := s.pool.Volumes(ctx, false)
	return slices.DeleteFunc(all, func(v engine.Info) bool { return !strings.HasPrefix(v.Name, s.o.Prefix) }), err
}
