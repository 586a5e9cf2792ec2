package viaservice

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// list returns the items of a list that has no pages.
func list[T any](ctx context.Context, p *Pool, path ...string) ([]T, error) {
	out, err := get[struct {
		Items []T `json:"items"`
	}](ctx, p, nil, path...)
	return out.Items, err
}

// get sends a request that only reads.
func get[T any](ctx context.Context, p *Pool, query map[string][]string, path ...string) (T, error) {
	return call[T](ctx, p, request{method: http.MethodGet, path: path, query: query, repeat: harmless})
}

// Volumes is as that of the engine.
func (p *Pool) Volumes(ctx context.Context, exact bool) ([]engine.Info, error) {
	measure := engine.MeasureSome
	if exact {
		measure = engine.MeasureAll
	}
	return p.volumes(ctx, measure)
}

// pageLength is the length of the longest page.
const pageLength = 1000

func (p *Pool) volumes(ctx context.Context, measure engine.Measure) ([]engine.Info, error) {
	query := map[string][]string{"limit": {strconv.Itoa(pageLength)}}
	if measure != engine.MeasureNone {
		query["measure"] = []string{string(measure)}
	}

	out := []engine.Info{}
	for {
		page, err := get[struct {
			Items []engine.Info `json:"items"`
			Next  string        `json:"next"`
		}](ctx, p, query, "volumes")
		if err != nil {
			return nil, err
		}
		out = append(out, page.Items...)
		if page.Next == "" {
			return out, nil
		}
		query["after"] = []string{page.Next}
	}
}

// VolumeNames is as that of the engine.
func (p *Pool) VolumeNames(ctx context.Context) ([]string, error) {
	all, err := p.volumes(ctx, engine.MeasureNone)
	var names []string
	for _, v := range all {
		names = append(names, v.Name)
	}
	return names, err
}

// Show is as that of the engine.
func (p *Pool) Show(ctx context.Context, r ref.Ref) (engine.Detail, error) {
	return get[engine.Detail](ctx, p, nil, "objects", r.String())
}

// Pool is as that of the engine.
func (p *Pool) Pool(ctx context.Context, exact bool) (engine.PoolInfo, error) {
	return get[engine.PoolInfo](ctx, p, map[string][]string{"exact": {strconv.FormatBool(exact)}}, "pool")
}

// Labels is as that of the engine.
func (p *Pool) Labels(ctx context.Context, r ref.Ref) (driver.Labels, error) {
	out, err := get[struct {
		Labels driver.Labels `json:"labels"`
	}](ctx, p, nil, "labels", r.String())
	return out.Labels, err
}

// LabelsInUse is as that of the engine.
func (p *Pool) LabelsInUse(ctx context.Context) ([]string, error) {
	words := map[string]bool{}
	add := func(l driver.Labels) {
		for k, v := range l.Map() {
			words[k+"="+v] = true
		}
	}

	vols, err := p.volumes(ctx, engine.MeasureNone)
	goldens, gerr := p.Goldens(ctx)
	for _, v := range vols {
		add(v.Labels)
	}
	for _, g := range goldens {
		add(g.Labels)
	}
	return slices.Sorted(maps.Keys(words)), errors.Join(err, gerr)
}

// SetLabels is as that of the engine.
func (p *Pool) SetLabels(ctx context.Context, q engine.LabelRequest) (engine.Info, error) {
	body := map[string]any{}
	if len(q.Set) > 0 {
		body["set"] = q.Set
	}
	if len(q.Remove) > 0 {
		body["remove"] = q.Remove
	}
	return change[engine.Info](ctx, p, request{method: http.MethodPatch, path: []string{"labels", q.Ref.String()},
		body: body, repeat: harmless})
}

// Pin is as that of the engine.
func (p *Pool) Pin(ctx context.Context, r ref.Ref, d time.Duration) (engine.Info, error) {
	return change[engine.Info](ctx, p, request{method: http.MethodPut, path: []string{"pins", r.String()},
		body: map[string]any{"seconds": d.Seconds()}, repeat: harmless})
}

// Unpin is as that of the engine.
func (p *Pool) Unpin(ctx context.Context, r ref.Ref) (engine.Info, error) {
	return change[engine.Info](ctx, p, request{method: http.MethodDelete, path: []string{"pins", r.String()},
		repeat: harmless})
}

// Rename is as that of the engine.
func (p *Pool) Rename(ctx context.Context, q engine.RenameRequest) (engine.Renamed, error) {
	return change[engine.Renamed](ctx, p, request{method: http.MethodPost, path: []string{"rename"},
		body: map[string]string{"ref": q.Ref.String(), "name": q.Name.String()}})
}

// Prune is as that of the engine.
func (p *Pool) Prune(ctx context.Context, q engine.PruneRequest) (*engine.PruneReport, error) {
	return operate[*engine.PruneReport](ctx, p, q.Tracker, request{method: http.MethodPost, path: []string{"prune"},
		body: client.PruneRequest{KeepFreePercent: q.KeepFreePercent, OlderThanSeconds: q.OlderThan.Seconds(),
			IdleSeconds: q.Idle.Seconds(), Labels: q.Labels.Words(), DryRun: q.DryRun}})
}

// GC is as that of the engine.
func (p *Pool) GC(ctx context.Context, explain bool) (*engine.GCReport, error) {
	return operate[*engine.GCReport](ctx, p, nil, request{method: http.MethodPost, path: []string{"gc"},
		body: map[string]any{"explain": explain}})
}

// historyMost is the largest number of events that the service returns.
const historyMost = 100_000

// History is engine.ReadHistory.
func (p *Pool) History(ctx context.Context, q engine.HistoryQuery) (engine.History, error) {
	query := map[string][]string{"limit": {strconv.Itoa(historyMost)}}
	if q.Limit > 0 {
		query["limit"] = []string{strconv.Itoa(min(q.Limit, historyMost))}
	}
	if q.Ref != "" {
		query["ref"] = []string{q.Ref}
	}
	if !q.Since.IsZero() {
		query["since"] = []string{q.Since.Format(time.RFC3339Nano)}
	}
	out, err := get[struct {
		Items []engine.HistoryEvent `json:"items"`
		More  bool                  `json:"more"`
	}](ctx, p, query, "history")
	return engine.History{Events: out.Items, More: out.More}, err
}

// Diff is as that of the engine.
func (p *Pool) Diff(ctx context.Context, q engine.DiffRequest) (engine.Difference, error) {
	query := map[string][]string{"a": {q.A.String()}, "b": {q.B.String()}}
	if f := freezes[q.Freeze]; f != "" {
		query["freeze"] = []string{f}
	}
	return get[engine.Difference](ctx, p, query, "diff")
}

// Export is as that of the engine, to standard output. Unsupported: to a file.
func (p *Pool) Export(ctx context.Context, q engine.ExportRequest) (engine.Exported, error) {
	out := engine.Exported{Ref: q.From.String(), File: q.File}
	if err := q.FindFormat(); err != nil {
		return out, err
	}
	out.Format = q.Format
	if q.File != "-" {
		return out, errs.New(errs.Unsupported, "export", out.Ref, "the service writes no files for its callers").
			WithHint("redirect the output: %s > %s",
				errs.Run("export", out.Ref, "-", errs.Param("format", string(q.Format))), errs.ShellWord(q.File))
	}

	query := map[string][]string{"format": {string(q.Format)}}
	if f := freezes[q.Freeze]; f != "" {
		query["freeze"] = []string{f}
	}
	resp, err := p.send(ctx, request{method: http.MethodGet, path: []string{"exports", out.Ref}, query: query,
		repeat: harmless})
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()

	// A body that is cut off is the only sign of an error after the first byte.
	q.Tracker.Start("exporting", 0, 0)
	body := &counted{resp.Body, q.Tracker}
	out.FileBytes, err = io.Copy(q.Stdout, body)
	switch {
	case ctx.Err() != nil:
		return out, ctx.Err()
	case errors.Is(err, io.ErrUnexpectedEOF):
		return out, errs.New(errs.IO, "export", out.Ref, "the service ended the export before its end").
			WithHint("discard what was written, and repeat the command")
	}
	return out, errs.Wrap("export", out.Ref, err)
}

// counted is a reader that reports what was read.
type counted struct {
	io.Reader
	t *progress.Tracker
}

// Read reads, and counts the bytes.
func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.t.Add(0, int64(n))
	return n, err
}
