package viaservice

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
)

// Goldens is as that of the engine.
func (p *Pool) Goldens(ctx context.Context) ([]engine.GoldenInfo, error) {
	return list[engine.GoldenInfo](ctx, p, "goldens")
}

// SetGolden is as that of the engine.
func (p *Pool) SetGolden(ctx context.Context, q engine.SetRequest) ([]string, error) {
	body := client.GoldenProperties{Keep: q.Keep, Overlay: policyWord(q.Overlay)}
	out, err := change[client.GoldenSet](ctx, p, request{method: http.MethodPatch,
		path: []string{"goldens", q.Golden.String()}, body: body})
	return out.Removed, err
}

// policyWord returns the word of a policy that may be missing.
func policyWord(o *driver.OverlayPolicy) string {
	if o == nil {
		return ""
	}
	return o.String()
}

// Publish is as that of the engine. Unsupported: a preset in a file.
func (p *Pool) Publish(ctx context.Context, q engine.PublishRequest) (engine.Published, error) {
	if err := presetByName("publish", q.Golden.String(), q.Preset); err != nil {
		return engine.Published{}, err
	}
	body := client.PublishRequest{Volume: q.Volume.String(), Force: q.Force, Keep: q.Keep, Overlay: policyWord(q.Overlay),
		Preset: q.Preset, Labels: q.Labels, Freeze: freezes[q.Freeze]}
	return operate[engine.Published](ctx, p, q.Tracker, request{method: http.MethodPost,
		path: []string{"goldens", q.Golden.String(), "publish"}, body: body, repeat: withAKey, key: string(driver.NewID())})
}

// presetByName refuses rules in a file of the caller: the service opens none. Unsupported.
func presetByName(op, golden, preset string) error {
	if !strings.ContainsAny(preset, "/.") {
		return nil
	}
	return errs.New(errs.Unsupported, op, golden, "the service reads no files of its callers").
		WithHint("name a preset: %s", errs.Param("preset", strings.Join(engine.Presets(), ", ")))
}

// interruptible returns a reader that ends with ctx, even while r waits for input: a request would wait for that, too.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	out, in := io.Pipe()
	context.AfterFunc(ctx, func() { _ = out.Close() }) // never fails
	go func() {
		_, err := io.Copy(in, r)
		_ = in.CloseWithError(err) // never fails
	}()
	return out
}

// Import is as that of the engine, of an archive on standard input. Unsupported: anything else.
func (p *Pool) Import(ctx context.Context, q engine.ImportRequest) (engine.Imported, error) {
	name := q.Name.String()
	if err := presetByName("import", name, q.Preset); err != nil {
		return engine.Imported{}, err
	}
	switch {
	case q.Source != "-" || q.Adopt || q.Replace || q.RemoveOld:
		return engine.Imported{}, errs.New(errs.Unsupported, "import", name, "the service reads no files of its callers").
			WithHint("pipe an archive into it: tar -C %s -c . | %s", errs.ShellWord(q.Source),
				errs.Run("golden import", name, "-"))
	case q.Keep != nil && *q.Keep == 0:
		return engine.Imported{}, errs.New(errs.Unsupported, "import", name,
			"the service cannot set this together with an import").
			WithHint("remove %s, and run %s afterwards", errs.Param("keep"), errs.Run("golden set", name, "keep=all"))
	}

	query := map[string][]string{}
	set := func(key, value string) {
		if value != "" {
			query[key] = []string{value}
		}
	}
	set("fs", string(q.FS))
	set("overlay", policyWord(q.Overlay))
	set("preset", q.Preset)
	if q.Update {
		set("update", "true")
	}
	if q.SizeBytes > 0 {
		set("size_bytes", strconv.FormatInt(q.SizeBytes, 10))
	}
	if q.Keep != nil {
		set("keep", strconv.Itoa(*q.Keep))
	}
	for k, v := range q.Labels {
		query["label"] = append(query["label"], k+"="+v)
	}

	q.Tracker.Start("sending", 0, 0)
	body := interruptible(ctx, &counted{q.Stdin, q.Tracker})
	return call[engine.Imported](ctx, p, request{method: http.MethodPost, path: []string{"goldens", name, "import"},
		query: query, body: body, contentType: "application/x-tar"})
}
