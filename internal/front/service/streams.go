package service

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// A client may take streamTimeout to send the next part of a stream, and while the service waits as long as this for
// parts, it must send minStreamBytes: an import holds the name of its golden, and one of the operations that its user
// may have. Tests use other values.
var (
	streamTimeout  = time.Minute
	minStreamBytes = int64(64 << 10)
)

// tarTypes are the content types of archives.
var tarTypes = []string{"application/x-tar", "application/zstd", "application/gzip", "application/octet-stream"}

// Stream is part of the input of requests whose body is a stream.
type Stream struct {
	body *patientReader
}

// Resolve keeps the body of a request for its handler.
func (s *Stream) Resolve(ctx huma.Context) []error {
	r, w := humago.Unwrap(ctx)
	s.body = &patientReader{Reader: r.Body, c: http.NewResponseController(w)}
	return nil
}

// patientReader gives each read its own deadline, so that a client that stops sending ends the request. The engine may
// still be reading in another goroutine when its call has returned: see finish.
type patientReader struct {
	io.Reader
	c *http.ResponseController

	mu       sync.Mutex
	reading  bool
	finished bool
	err      error // of the last read

	waited time.Duration // for parts, since the rate was checked last
	got    int64         // bytes of these
}

// Read reads a part of the body.
func (p *patientReader) Read(b []byte) (int, error) {
	if !p.begin() {
		return 0, io.ErrClosedPipe
	}
	begun := time.Now()
	n, err := p.Reader.Read(b)

	p.mu.Lock()
	defer p.mu.Unlock()
	if errors.Is(err, os.ErrDeadlineExceeded) && !p.finished {
		err = tooSlow("nothing has come for %s", streamTimeout)
	} else if err == nil {
		err = p.checkRate(n, time.Since(begun))
	}
	p.reading, p.err = false, err
	if err == io.EOF && !p.finished {
		_ = p.c.SetReadDeadline(time.Time{}) // what follows takes as long as it takes
	}
	return n, err
}

// checkRate returns an error if a client sends too slowly. The mutex is held.
func (p *patientReader) checkRate(n int, waited time.Duration) error {
	p.got, p.waited = p.got+int64(n), p.waited+waited
	if p.waited < streamTimeout {
		return nil
	}
	got := p.got
	p.got, p.waited = 0, 0
	if got >= minStreamBytes {
		return nil
	}
	return tooSlow("%s came in %s, and at least %s must", errs.FormatBytes(got), streamTimeout,
		errs.FormatBytes(minStreamBytes))
}

// tooSlow is the error of a stream that comes too slowly.
func tooSlow(format string, args ...any) error {
	return problemOf(errs.New(errs.Canceled, "import", "", "the archive comes too slowly: "+format, args...).
		WithHint("write the archive to a file first, and send that")).withStatus(http.StatusRequestTimeout)
}

// begin sets the deadline of a read, unless the request has ended.
func (p *patientReader) begin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.finished {
		p.reading = true
		_ = p.c.SetReadDeadline(time.Now().Add(streamTimeout)) // writers of tests have none
	}
	return !p.finished
}

// finish ends reading, and limits how long the server waits for the rest of a body before it answers.
func (p *patientReader) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished = true
	switch {
	case p.err == io.EOF:
	case p.err != nil || p.reading:
		_ = p.c.SetReadDeadline(time.Now()) // there is no rest, or nobody wants it
	default:
		_ = p.c.SetReadDeadline(time.Now().Add(streamTimeout))
	}
}

// ImportedGolden is a golden that was imported.
type ImportedGolden struct {
	engine.Imported
}

type importInput struct {
	InGolden
	Repeatable
	Update    bool     `query:"update" doc:"Make the next generation of a golden that exists"`
	FS        string   `query:"fs" enum:"native,ext4,xfs" doc:"Filesystem of the volume (default: as the driver prefers)"`
	SizeBytes int64    `query:"size_bytes" minimum:"0" doc:"Size of the volume (default: large enough)"`
	Keep      int      `query:"keep" minimum:"0" doc:"From now on, keep this many of the newest generations"`
	Overlay   string   `query:"overlay" enum:"never,default,allowed" doc:"From now on, whether clones are overlays"`
	Preset    string   `query:"preset" pattern:"^[a-z0-9-]+$" doc:"Name of a preset"`
	Label     []string `query:"label,explode" doc:"Label of the golden, KEY=VALUE (Repeatable)"`
	Stream
}

type importAnswer struct {
	Status   int
	Location string `header:"Location"`
	ETag     string `header:"ETag"`
	Body     ImportedGolden
}

func (s *Service) addStreamRoutes() {
	body := &huma.RequestBody{Required: true, Description: "A tar archive; gzip and zstd are recognized",
		Content: map[string]*huma.MediaType{}}
	for _, t := range tarTypes {
		body.Content[t] = &huma.MediaType{Schema: &huma.Schema{Type: "string", Format: "binary"}}
	}
	add(s, route{id: "import-golden", access: makes, method: "POST", path: "/v1/goldens/{golden}/import", tag: "goldens",
		status: http.StatusCreated, summary: "Make a golden from a tar archive", body: body,
		about: "The answer comes when the golden is durable; until then it is in the list of operations. If the client " +
			"goes away, nothing of it stays. A repetition with the same Idempotency-Key must have the same parameters; its " +
			"body is not read."}, s.importGolden)

	add(s, route{id: "export", access: makes, method: "GET", path: "/v1/exports/{ref}", tag: "volumes",
		summary: "Export the files or the image of a volume, snapshot or generation",
		about: "If it fails after it has begun, the connection is closed before the end of the body, which clients must " +
			"notice.",
		answer: &huma.Response{Description: "The archive or image", Content: map[string]*huma.MediaType{
			"application/x-tar":        {Schema: &huma.Schema{Type: "string", Format: "binary"}},
			"application/zstd":         {Schema: &huma.Schema{Type: "string", Format: "binary"}},
			"application/octet-stream": {Schema: &huma.Schema{Type: "string", Format: "binary"}},
		}}}, s.export)
}

func (s *Service) importGolden(ctx context.Context, in *importInput) (*importAnswer, error) {
	const op = "import"
	defer in.body.finish()
	q := engine.ImportRequest{Source: "-", Stdin: in.body, FS: driver.FS(in.FS), SizeBytes: in.SizeBytes,
		Update: in.Update, Preset: in.Preset}
	var err error
	if q.Name, err = in.name(op); err != nil {
		return nil, err
	}
	if q.Overlay, err = overlayPolicy(op, in.Overlay); err != nil {
		return nil, err
	}
	if in.Keep > 0 {
		q.Keep = &in.Keep
	}
	labels, err := driver.ParseLabels(op, in.Label)
	if err != nil {
		return nil, err
	}
	q.Labels = labels.Map()
	if err := grantOf(ctx).mayImport(op, in.Golden, map[string]bool{"keep": q.Keep != nil, "overlay": q.Overlay != nil,
		"label": len(q.Labels) > 0}); err != nil {
		return nil, err
	}

	parameters := []any{in.FS, in.SizeBytes, in.Update, in.Preset, in.Overlay, in.Keep, q.Labels}
	var out engine.Imported
	made, repeated, err := s.makeOnce(ctx, in.Repeatable, op+" "+in.Golden, parameters,
		func(ctx context.Context) ([]engine.Info, error) {
			_, err := s.during(ctx, op, in.Golden, func(ctx context.Context, t *progress.Tracker) (_ any, err error) {
				q.Tracker = t
				out, err = s.e.Import(ctx, q)
				return out, err
			})
			return []engine.Info{out.Info}, err
		})
	if err != nil {
		return nil, err
	}

	answer := &importAnswer{Status: http.StatusCreated, Body: ImportedGolden{out}}
	if repeated {
		answer.Status, answer.Body.Info = http.StatusOK, made[0]
	}
	answer.ETag, answer.Location = etag(made[0]), locationOf(made[0])
	answer.Body.Warnings = append(answer.Body.Warnings, warned(ctx)...)
	return answer, nil
}

// exportTypes are the content types of the formats.
var exportTypes = map[engine.ExportFormat]string{
	engine.ExportTar: "application/x-tar", engine.ExportTarZstd: "application/zstd",
	engine.ExportRaw: "application/octet-stream", engine.ExportQcow2: "application/octet-stream",
}

type exportInput struct {
	Object
	Format string `query:"format" enum:"tar,tar.zst,raw,qcow2" default:"tar"`
	Freeze string `query:"freeze" enum:"if_needed,always,never" doc:"Stop writes to a volume in use"`
}

func (s *Service) export(ctx context.Context, in *exportInput) (*huma.StreamResponse, error) {
	r, err := ref.Parse("export", in.Ref)
	if err != nil {
		return nil, err
	}

	format := engine.ExportFormat(in.Format)
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		w := &lateHeader{ctx: hc, contentType: exportTypes[format]}
		_, err := s.during(ctx, "export", in.Ref, func(ctx context.Context, t *progress.Tracker) (any, error) {
			return s.e.Export(ctx, engine.ExportRequest{From: r, File: "-", Stdout: w, Format: format,
				Freeze: freezes[in.Freeze], Tracker: t})
		})
		switch {
		case err == nil:
			w.begin() // an empty image
		case w.begun:
			panic(http.ErrAbortHandler) // the client sees a body that is cut off
		default:
			writeProblem(s.api, hc, problemOf(err))
		}
	}}, nil
}

// lateHeader sends the header of a response with its first byte: until then the answer can be an error.
type lateHeader struct {
	ctx         huma.Context
	contentType string
	begun       bool
}

func (l *lateHeader) begin() {
	if !l.begun {
		l.begun = true
		l.ctx.SetHeader("Content-Type", l.contentType)
		l.ctx.SetStatus(http.StatusOK)
	}
}

// Write writes a part of the body.
func (l *lateHeader) Write(b []byte) (int, error) {
	l.begin()
	return l.ctx.BodyWriter().Write(b)
}

// historyInput selects events of the past.
type historyInput struct {
	Ref   string    `query:"ref" doc:"Only events of what had this name: VOLUME, GOLDEN, VOLUME@SNAPSHOT or GOLDEN@N"`
	Since time.Time `query:"since" doc:"Only events since this time"`
	Limit int       `query:"limit" minimum:"1" maximum:"100000" default:"100" doc:"Only the newest ones"`
}

// EventList lists events, the oldest first.
type EventList struct {
	Items []engine.HistoryEvent `json:"items" nullable:"false"`
	More  bool                  `json:"more" doc:"There are older ones"`
}

func (s *Service) history(ctx context.Context, in *historyInput) (*struct{ Body EventList }, error) {
	q := engine.HistoryQuery{Since: in.Since, Limit: in.Limit, Keep: keepsEvent(ctx)}
	if in.Ref != "" {
		r, err := ref.Parse("history", in.Ref)
		if err != nil {
			return nil, err
		}
		q.Ref = r.String()
	}
	h, err := engine.ReadHistory(s.e.Dir(), q)
	if err != nil {
		return nil, err
	}
	return &struct{ Body EventList }{EventList{append([]engine.HistoryEvent{}, h.Events...), h.More}}, nil
}

// eventJSON is the data of an event of the stream.
func eventJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		b, _ = json.Marshal(problemOf(errs.Wrap("events", "", err)).in(httpWords{}))
	}
	return b
}
