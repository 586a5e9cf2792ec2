package service

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/observe/iostat"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// VolumeActivity is what a volume wrote, and how long programs waited for its syncs, in an interval. It has nothing of
// what others write to the same disk.
type VolumeActivity struct {
	Time    time.Time `json:"time" doc:"End of the interval"`
	Seconds float64   `json:"seconds" doc:"Length of the interval"`
	Mounted bool      `json:"mounted" doc:"If not, all that follows is missing"`

	ApplicationBytes *int64        `json:"application_bytes,omitempty" doc:"That programs wrote; missing: unknown"`
	WrittenBytes     *int64        `json:"written_bytes,omitempty" doc:"That reached its own device; missing: it has none"`
	Flushes          *int64        `json:"flushes,omitempty" doc:"Of its own device; missing: unknown"`
	Syncs            *iostat.Syncs `json:"syncs,omitempty" doc:"That programs waited for; missing: unknown"`
	Missing          []string      `json:"missing,omitempty" doc:"What was not measured, and why"`
}

type activityInput struct {
	InVolume
	Interval float64 `query:"interval_seconds" minimum:"0.1" maximum:"60" default:"1" doc:"Length of the intervals"`
}

func (s *Service) addActivityRoutes() {
	add(s, route{id: "watch-volume", access: reads, method: "GET", path: "/v1/volumes/{volume}/iostat", tag: "volumes",
		summary: "Follow what a volume writes, and how long its syncs take",
		about: "Server-sent events called sample: the data of each is what was measured in an interval. A volume that is " +
			"not mounted has samples that say so.",
		answer: &huma.Response{Description: "The samples", Content: map[string]*huma.MediaType{
			"text/event-stream": {Schema: &huma.Schema{Type: "string"}}}}}, s.watchVolume)
}

func (s *Service) watchVolume(ctx context.Context, in *activityInput) (*huma.StreamResponse, error) {
	name, err := in.name("watch")
	if err != nil {
		return nil, err
	}
	if _, err := s.mountpoint(ctx, name); err != nil {
		return nil, err
	}
	end, err := s.streams.begin(callerOf(ctx))
	if err != nil {
		return nil, err
	}

	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer end()
		hc.SetHeader("Content-Type", "text/event-stream")
		hc.SetHeader("Cache-Control", "no-store")
		hc.SetStatus(http.StatusOK)
		_, w := humago.Unwrap(hc)
		s.sendActivity(ctx, w, name, seconds(in.Interval))
	}}, nil
}

// mountpoint returns where a volume is mounted now; "" if it is not. NotFound.
func (s *Service) mountpoint(ctx context.Context, volume ref.Name) (string, error) {
	found, err := s.e.Mountpoints(ctx, "watch", volume)
	if err != nil || len(found) == 0 {
		return "", err
	}
	return found[0].Mountpoint, nil
}

// sendActivity sends samples until the client goes away, the service ends, or the caller may no longer see the volume.
func (s *Service) sendActivity(ctx context.Context, w http.ResponseWriter, volume ref.Name, interval time.Duration) {
	a := &activity{}
	defer a.set(ctx, "")
	out := http.NewResponseController(w)
	tick := time.NewTicker(interval)
	defer tick.Stop()

	send := func(event string, v any) bool {
		text, err := json.Marshal(v)
		if err == nil {
			_, err = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event, text)
		}
		return err == nil && out.Flush() == nil
	}
	for {
		now, err := s.still(ctx, "watch-volume", reads)
		where := ""
		if err == nil {
			where, err = s.mountpoint(now, volume)
		}
		if err != nil {
			send("error", problemOf(err).in(wordsOf(ctx)))
			return
		}
		if !send("sample", a.sample(ctx, where, interval)) {
			return
		}

		select {
		case <-ctx.Done():
			return
		case <-s.closing:
			return
		case <-tick.C:
		}
	}
}

// activity watches one volume.
type activity struct {
	where   string
	watcher *iostat.Watcher
	failed  string // why it cannot be watched
}

// set watches the mount at where, and nothing if that is "".
func (a *activity) set(ctx context.Context, where string) {
	if a.watcher != nil {
		a.watcher.Close()
	}
	a.where, a.watcher, a.failed = where, nil, ""
	if where == "" {
		return
	}

	w, err := iostat.New(ctx, []iostat.Target{{Name: "volume", Path: where, Only: true}})
	if err != nil {
		a.failed = errs.Reason(err)
		return
	}
	a.watcher = w
}

// sample returns what happened since the last one.
func (a *activity) sample(ctx context.Context, where string, interval time.Duration) VolumeActivity {
	out := VolumeActivity{Time: time.Now().UTC(), Seconds: interval.Seconds(), Mounted: where != ""}
	if where != a.where {
		a.set(ctx, where)
	}
	if a.failed != "" {
		out.Missing = []string{a.failed}
	}
	if a.watcher == nil {
		return out
	}

	s := a.watcher.Sample()
	out.Time, out.Seconds, out.Missing = s.Time, s.Seconds, s.Missing
	if len(s.Targets) == 0 {
		a.set(ctx, "") // unmounted in the meantime
		out.Mounted = false
		return out
	}
	t := s.Targets[0]
	out.ApplicationBytes, out.Syncs = t.ApplicationBytes, t.Syncs
	if t.Own != nil {
		out.WrittenBytes, out.Flushes = &t.Own.WrittenBytes, t.Own.Flushes
	}
	return out
}
