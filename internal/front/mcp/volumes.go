package mcp

import (
	"context"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// Limits of lists in a result.
const (
	maxVolumes = 1000
	maxChanges = 1000
)

// volume is a volume as clients see it: by name, without paths of the host.
type volumeInfo struct {
	Name      string     `json:"name"`
	Origin    string     `json:"origin" jsonschema:"what it was cloned from"`
	State     string     `json:"state" jsonschema:"idle or mounted"`
	Mine      bool       `json:"mine" jsonschema:"made in this session, so it can be changed and destroyed"`
	SizeBytes int64      `json:"size_bytes" jsonschema:"0: as large as the pool"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at,omitempty" jsonschema:"when it is destroyed; put off while this session lives"`
}

func (s *Server) infoOf(v engine.Info) volumeInfo {
	return volumeInfo{Name: v.Name, Origin: s.shown(v.Origin), State: v.State, Mine: s.isMine(v.Labels),
		SizeBytes: v.SizeBytes, CreatedAt: v.CreatedAt, ExpiresAt: v.ExpiresAt}
}

// goldenInfo is a golden as clients see it.
type goldenInfo struct {
	Name         string    `json:"name"`
	Generation   int       `json:"generation" jsonschema:"the current one, which a clone of NAME gets"`
	LogicalBytes int64     `json:"logical_bytes"`
	CreatedAt    time.Time `json:"created_at"`
}

// limits are those of the server.
type limits struct {
	Prefix         string   `json:"prefix" jsonschema:"names of volumes must begin with it"`
	Publish        []string `json:"publish" jsonschema:"patterns of goldens that publish may change"`
	MaxVolumes     int      `json:"max_volumes"`
	TimeoutSeconds float64  `json:"timeout_seconds" jsonschema:"of a command at most"`
	KeptAtEnd      bool     `json:"kept_at_end" jsonschema:"volumes stay when this session ends"`
}

type listed struct {
	Goldens   []goldenInfo `json:"goldens"`
	Volumes   []volumeInfo `json:"volumes"`
	Truncated bool         `json:"truncated" jsonschema:"there are more volumes than listed"`
	Limits    limits       `json:"limits"`
	also
}

func (s *Server) list(ctx context.Context, _ struct{}) (listed, error) {
	out := listed{Goldens: []goldenInfo{}, Volumes: []volumeInfo{}, Limits: limits{Prefix: s.o.Prefix,
		Publish: append([]string{}, s.o.Publish...), MaxVolumes: s.o.MaxVolumes,
		TimeoutSeconds: s.o.Timeout.Seconds(), KeptAtEnd: s.o.Keep}}

	goldens, err := s.pool.Goldens(ctx)
	if err != nil {
		return out, err
	}
	for _, g := range goldens {
		if s.mayClone(g.Golden) {
			out.Goldens = append(out.Goldens, goldenInfo{g.Golden, g.Generation, g.LogicalBytes, g.CreatedAt})
		}
	}

	volumes, err := s.seen(ctx)
	if err != nil {
		return out, err
	}
	if out.Truncated = len(volumes) > maxVolumes; out.Truncated {
		volumes = volumes[:maxVolumes]
	}
	for _, v := range volumes {
		out.Volumes = append(out.Volumes, s.infoOf(v))
	}
	return out, nil
}

type cloneArgs struct {
	From string `json:"from" jsonschema:"GOLDEN, GOLDEN@N, VOLUME or VOLUME@SNAPSHOT"`
	Name string `json:"name,omitempty" jsonschema:"of the new volume, with the prefix; default: a generated name"`
}

type cloned struct {
	Volume volumeInfo `json:"volume"`
	also
}

func (s *Server) clone(ctx context.Context, in cloneArgs) (out cloned, err error) {
	const op = "clone"
	if in.Name == "" {
		in.Name = s.o.Prefix + string(driver.NewID()[:10])
	}
	name, err := s.volume(op, in.Name)
	if err != nil {
		return out, err
	}
	from, err := s.source(ctx, op, in.From)
	if err != nil {
		return out, err
	}
	labels, err := s.labels()
	if err != nil {
		return out, err
	}

	// Reserve a place, and note the volume before it exists: even a call that fails may have made it.
	expires := time.Time{}
	if s.o.TTL > 0 {
		expires = time.Now().Add(s.o.TTL)
	}
	if err := s.admit(ctx, name); err != nil {
		return out, err
	}
	made, err := s.pool.Clone(ctx, engine.CloneRequest{From: from, Name: name, Mount: true, Labels: labels,
		TTL: s.ttl(expires), Ephemeral: !s.o.Keep, GoldenDecides: !s.o.NoMounts})
	s.admitted(name, expires, err)
	if err != nil {
		return out, err
	}
	return cloned{Volume: s.infoOf(made[0])}, nil
}

// admit makes room for one more volume. NoSpace.
func (s *Server) admit(ctx context.Context, name ref.Name) error {
	if s.room() {
		return nil
	}

	// Some may have gone in other ways.
	s.mu.Lock()
	made := make([]ref.Name, 0, len(s.made))
	for n := range s.made {
		made = append(made, n)
	}
	s.mu.Unlock()
	for _, n := range made {
		labels, err := s.pool.Labels(ctx, n.Ref())
		if errs.Is(err, errs.NotFound) || err == nil && !s.isMine(labels) {
			s.forget(n)
		}
	}
	if s.room() {
		return nil
	}
	return errs.New(errs.NoSpace, "clone", name.String(), "this server may have %s, and has them",
		errs.Plural(s.o.MaxVolumes, "volume")).WithHint("destroy a volume that is no longer needed")
}

// room reserves a place for a volume if there is one.
func (s *Server) room() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.made)+s.making >= s.o.MaxVolumes {
		return false
	}
	s.making++
	return true
}

// admitted notes a volume in its place. A clone whose answer was lost is noted, too: unless it has the label, nothing
// happens to it.
func (s *Server) admitted(name ref.Name, expires time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.making--
	if _, has := s.made[name]; !has && (err == nil || errs.Is(err, errs.IO, errs.Canceled, errs.Internal)) {
		s.made[name] = expires
	}
}

type snapshotArgs struct {
	Volume string `json:"volume"`
	Name   string `json:"name,omitempty" jsonschema:"of the snapshot; default: the time"`
}

type snapshotted struct {
	Snapshot  string    `json:"snapshot" jsonschema:"VOLUME@SNAPSHOT"`
	CreatedAt time.Time `json:"created_at"`
	also
}

func (s *Server) snapshot(ctx context.Context, in snapshotArgs) (out snapshotted, err error) {
	q := engine.SnapshotRequest{}
	if q.Volume, err = s.own(ctx, "snapshot", in.Volume); err != nil {
		return out, err
	}
	if in.Name != "" {
		if q.Name, err = ref.ParseName("snapshot", in.Name); err != nil {
			return out, err
		}
	}
	if q.Labels, err = s.labels(); err != nil {
		return out, err
	}
	info, err := s.pool.Snapshot(ctx, q)
	return snapshotted{Snapshot: info.Name, CreatedAt: info.CreatedAt}, err
}

type rewindArgs struct {
	Volume   string `json:"volume"`
	Snapshot string `json:"snapshot" jsonschema:"name of the snapshot, without the volume"`
}

type rewound struct {
	Volume volumeInfo `json:"volume"`
	Before string     `json:"before" jsonschema:"snapshot with the state before: VOLUME@SNAPSHOT"`
	also
}

func (s *Server) rewind(ctx context.Context, in rewindArgs) (out rewound, err error) {
	q := engine.RewindRequest{Detach: true}
	if q.Volume, err = s.own(ctx, "rewind", in.Volume); err != nil {
		return out, err
	}
	if q.Snapshot, err = ref.ParseName("rewind", strings.TrimPrefix(in.Snapshot, in.Volume+"@")); err != nil {
		return out, err
	}
	r, err := s.pool.Rewind(ctx, q)
	return rewound{Volume: s.infoOf(r.Info), Before: r.Before}, err
}

type diffArgs struct {
	Volume  string `json:"volume" jsonschema:"VOLUME or VOLUME@SNAPSHOT"`
	Against string `json:"against,omitempty" jsonschema:"the older state; default: what the volume was cloned from"`
}

// change is a changed path.
type change struct {
	Op         string      `json:"op" jsonschema:"added, modified, deleted or renamed"`
	Path       engine.Path `json:"path" jsonschema:"a backslash is written as \\\\ and a byte that is not UTF-8 as \\xHH"`
	From       engine.Path `json:"from,omitempty"`
	Type       string      `json:"type"`
	SizeBefore int64       `json:"size_before"`
	SizeAfter  int64       `json:"size_after"`
}

type difference struct {
	Notice    string          `json:"notice"`
	A         string          `json:"a"`
	B         string          `json:"b"`
	Stat      engine.DiffStat `json:"stat" jsonschema:"numbers of all changes"`
	Changes   []change        `json:"changes" jsonschema:"untrusted"`
	Truncated bool            `json:"truncated" jsonschema:"there are more changes than listed"`
	also
}

func (s *Server) diff(ctx context.Context, in diffArgs) (out difference, err error) {
	const op = "diff"
	q := engine.DiffRequest{}
	if q.B, err = s.source(ctx, op, in.Volume); err != nil {
		return out, err
	}
	if in.Against == "" {
		if in.Against, err = s.originOf(ctx, op, q.B); err != nil {
			return out, err
		}
	}
	if q.A, err = s.source(ctx, op, in.Against); err != nil {
		return out, err
	}

	d, err := s.pool.Diff(ctx, q)
	if err != nil {
		return out, err
	}
	out = difference{Notice: untrusted, A: d.A, B: d.B, Stat: d.Stat, Changes: []change{}}
	if out.Truncated = len(d.Changes) > maxChanges; out.Truncated {
		d.Changes = d.Changes[:maxChanges]
	}
	for _, c := range d.Changes {
		out.Changes = append(out.Changes, change{c.Op, c.Path, c.From, c.Type, c.SizeBefore, c.SizeAfter})
	}
	return out, nil
}

// originOf returns what a volume was cloned from. NotFound: nothing that the client may see.
func (s *Server) originOf(ctx context.Context, op string, r ref.Ref) (string, error) {
	d, err := s.pool.Show(ctx, r)
	origin := s.shown(d.Origin)
	if err == nil && origin == "" {
		err = errs.New(errs.NotFound, op, r.String(), "it was not cloned from anything that can be compared").
			WithHint("say with against what to compare it with")
	}
	return origin, err
}

type publishArgs struct {
	Volume string `json:"volume"`
	Golden string `json:"golden" jsonschema:"gets the generation; created if it does not exist"`
}

type published struct {
	Golden  string   `json:"golden"`
	Ref     string   `json:"ref" jsonschema:"the new generation: GOLDEN@N"`
	Removed []string `json:"removed" jsonschema:"older generations that the golden does not keep"`
	also
}

func (s *Server) publish(ctx context.Context, in publishArgs) (out published, err error) {
	const op = "publish"
	q := engine.PublishRequest{}
	if q.Golden, err = ref.ParseName(op, in.Golden); err != nil {
		return out, err
	}
	if !matches(s.o.Publish, in.Golden) {
		return out, errs.New(errs.Permission, op, in.Golden, "this server may not publish this golden").
			WithHint("the person who runs the server can allow it with %s", errs.Param("publish", in.Golden))
	}
	if q.Volume, err = s.own(ctx, op, in.Volume); err != nil {
		return out, err
	}

	p, err := s.pool.Publish(ctx, q)
	if err != nil {
		return out, err
	}
	out = published{Golden: p.Golden, Ref: ref.Generation(p.Golden, p.Generation),
		Removed: append([]string{}, p.Removed...)}
	s.mu.Lock()
	s.published = append(s.published, out.Ref)
	s.mu.Unlock()
	return out, nil
}

type destroyArgs struct {
	Ref string `json:"ref" jsonschema:"VOLUME, or VOLUME@SNAPSHOT"`
}

type destroyed struct {
	Destroyed string `json:"destroyed"`
	also
}

func (s *Server) destroyTool(ctx context.Context, in destroyArgs) (out destroyed, err error) {
	const op = "destroy"
	r, err := ref.Parse(op, in.Ref)
	if err != nil {
		return out, err
	}
	name, err := s.own(ctx, op, r.Name)
	if err != nil {
		return out, err
	}

	// The label is checked again when the volume is destroyed; snapshots that a rewind has made have none.
	whole := r == name.Ref()
	if err := s.destroy(ctx, r, whole && !s.o.AllowDestroy); err != nil {
		return out, err
	}
	if whole {
		s.forget(name)
	}
	return destroyed{Destroyed: in.Ref}, nil
}
