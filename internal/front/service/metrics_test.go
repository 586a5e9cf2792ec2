package service

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sys/unix"
)

// freshScrapes makes each scrape of a test read the pool.
func freshScrapes(t testing.TB) {
	before := scrapeFresh
	scrapeFresh = 0
	t.Cleanup(func() { scrapeFresh = before })
}

// scrape reads the metrics, as text and by name.
func (s *served) scrape() (string, map[string]*dto.MetricFamily) {
	s.t.Helper()
	status, text := s.raw("GET", metricsPath, "")
	if status != http.StatusOK {
		s.t.Fatalf("status %d: %s", status, text)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	must(s.t, err)
	return text, families
}

// value returns the value of the series of a metric with these labels, each as NAME=VALUE; "none" if there is no such
// series.
func value(families map[string]*dto.MetricFamily, name string, labels ...string) string {
	for _, m := range families[name].GetMetric() {
		var have []string
		for _, l := range m.GetLabel() {
			have = append(have, l.GetName()+"="+l.GetValue())
		}
		if slices.Sort(labels); slices.Equal(have, labels) {
			v := m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			return fmt.Sprint(v)
		}
	}
	return "none"
}

// expect compares values, given as NAME LABEL... and the value.
func (s *served) expect(values map[string]string) {
	s.t.Helper()
	text, families := s.scrape()
	for what, want := range values {
		words := strings.Fields(what)
		if got := value(families, words[0], words[1:]...); got != want {
			s.t.Errorf("%s: got %s, want %s", what, got, want)
		}
	}
	if s.t.Failed() {
		s.t.Log(text)
	}
}

// busy makes a pool with something of everything that has metrics, until the end of the test. The remote is called
// backup.
func busy(t *testing.T) *served {
	t.Helper()
	freshScrapes(t)
	s := serve(t, newPool(t, reflink.Name), func(o *Options) { o.MetricsVolumes = 1 })
	ctx := t.Context()
	s.scrape() // events count from now on

	_, err := s.c.Import(ctx, "web", archive(t, map[string]string{"file": "v1"}),
		client.ImportOptions{SizeBytes: 64 << 20})
	must(t, err)
	for _, name := range []string{"other", "third", "job"} {
		v, err := s.c.Clone(ctx, client.CloneRequest{From: "web", Name: name, Make: client.Make{Mount: name == "job"}})
		must(t, err)
		if v.Mountpoint != "" {
			must(t, os.WriteFile(filepath.Join(v.Mountpoint, "own"), make([]byte, 2<<20), 0o644))
		}
	}
	_, err = s.c.Volume(ctx, "job") // which measures it
	must(t, err)
	_, err = s.c.Snapshot(ctx, "job", client.SnapshotRequest{Name: "v1"})
	must(t, err)
	_, err = s.c.Volume(ctx, "nix")
	want(t, "an unknown volume", err, client.NotFound, http.StatusNotFound)

	// Push, and verify something that does not exist.
	_, err = replicate.Add(ctx, s.e, replicate.AddRequest{Name: "backup", URL: "file://" + t.TempDir(), MustCreate: true})
	must(t, err)
	op, err := s.c.Push(ctx, "backup", client.PushRequest{Refs: []string{"web", "job", "other"}})
	done[any](s, op, err)
	op, err = s.c.Rebase(ctx, "nix", "web", "")
	must(t, err)
	_, err = s.c.Wait(ctx, op.ID, nil)
	want(t, "a rebase of nothing", err, client.NotFound, http.StatusNotFound)

	s.expireOne()
	s.keepDestroyed()
	s.runUntilEnd()
	return s
}

// expireOne makes a volume that expires, and destroys it in time.
func (s *served) expireOne() {
	s.t.Helper()
	ctx := context.Background()
	_, err := s.e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "web"}, Name: ref.MustName("brief"),
		TTL: time.Nanosecond})
	must(s.t, err)
	r, err := s.e.Maintain(ctx)
	must(s.t, err)
	if _, err := s.e.Show(ctx, ref.Ref{Name: "brief"}); !errs.Is(err, errs.NotFound) {
		s.t.Fatalf("%+v, and then %v", r, err) // the service may have been faster
	}
}

// keepDestroyed destroys a volume that the filesystem keeps until the end of the test.
func (s *served) keepDestroyed() {
	s.t.Helper()
	info, err := s.c.Clone(s.t.Context(), client.CloneRequest{From: "web", Name: "kept"})
	must(s.t, err)
	data, err := filepath.Glob(filepath.Join(s.e.Dir(), "data", "objects", info.ID+"*"))
	if err != nil || len(data) == 0 {
		s.t.Fatalf("%q, %v", data, err)
	}
	chattr := func(mode string) {
		if out, err := exec.Command("chattr", append([]string{mode}, data...)...).CombinedOutput(); err != nil {
			s.t.Errorf("chattr: %v: %s", err, out)
		}
	}
	chattr("+i")
	s.t.Cleanup(func() { chattr("-i") })
	_ = s.c.Destroy(s.t.Context(), "kept", "") // it is destroyed, and its data stays
}

// runUntilEnd runs something in a volume until the end of the test.
func (s *served) runUntilEnd() {
	running, end, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		_, err := s.e.Run(context.Background(), engine.RunRequest{From: ref.Ref{Name: "web"}, Name: ref.MustName("running"),
			Do: func(context.Context, engine.Info) error { close(running); <-end; return nil }})
		ended <- err
	}()
	<-running
	s.t.Cleanup(func() {
		close(end)
		if err := <-ended; err != nil {
			s.t.Errorf("run: %v", err)
		}
	})
}

// TestMetrics compares metrics with what was done.
func TestMetrics(t *testing.T) {
	s := busy(t)
	text, _ := s.scrape()
	s.expect(map[string]string{
		"pando_objects kind=volume":     "4", // with the one that runs
		"pando_objects kind=snapshot":   "3", // two are of the pushes
		"pando_objects kind=generation": "1",
		"pando_mounted_volumes":         "2",
		"pando_goldens":                 "1",
		"pando_goldens_omitted":         "0",
		"pando_expired_volumes":         "0",

		"pando_golden_generations golden=web":   "1",
		"pando_golden_clones golden=web":        "4",
		"pando_golden_cached_builds golden=web": "0",

		"pando_deleted_objects held_by=reclaim": "1",
		"pando_marks op=run":                    "1",
		"pando_pool_reserve_complete":           "1",
		"pando_volumes_omitted":                 "3",

		"pando_volume_mounted volume=job golden=web":   "1",
		"pando_volume_mounted volume=other golden=web": "none",

		"pando_events_total verb=clone":                      "6",
		"pando_events_total verb=expire":                     "1",
		"pando_events_total verb=push":                       "3",
		"pando_recovery_actions_total action=expired":        "1",
		"pando_errors_total source=request kind=no_space":    "0",
		"pando_errors_total source=operation kind=not_found": "1",

		"pando_http_requests_total route=clone-volume status=201":   "4",
		"pando_http_requests_total route=show-volume status=404":    "1",
		"pando_http_request_duration_seconds route=clone-volume":    "4",
		"pando_operation_duration_seconds verb=push state=done":     "1",
		"pando_operation_duration_seconds verb=rebase state=failed": "1",
		"pando_operations_running verb=push":                        "0",

		"pando_scrape_success part=catalogue": "1", "pando_scrape_success part=space": "1",
		"pando_scrape_success part=history": "1", "pando_scrape_success part=remotes": "1",
	})

	// Times are now, and sizes those of the pool.
	_, families := s.scrape()
	now := float64(time.Now().Unix())
	for _, name := range []string{"remote_last_push", "golden_last_push", "golden_current", "maintenance_last_success",
		"oldest_deleted", "oldest_mark", "volume_last_push"} {
		all := families["pando_"+name+"_timestamp_seconds"].GetMetric()
		if len(all) == 0 {
			t.Fatalf("%s is missing:\n%s", name, text)
		}
		if v := all[0].GetGauge().GetValue(); v < now-120 || v > now+5 {
			t.Errorf("%s: %f, and it is %f now", name, v, now)
		}
	}
	p, err := s.e.Pool(t.Context(), false)
	must(t, err)
	if got := value(families, "pando_pool_size_bytes"); got != fmt.Sprint(float64(p.TotalBytes)) {
		t.Errorf("size: %s, want %d", got, p.TotalBytes)
	}

	// A push of what has not changed counts.
	before := families["pando_remote_last_push_timestamp_seconds"].GetMetric()[0].GetGauge().GetValue()
	op, err := s.c.Push(t.Context(), "backup", client.PushRequest{Refs: []string{"other"}})
	if r := done[[]map[string]any](s, op, err); len(r) != 1 || r[0]["unchanged"] != true {
		t.Errorf("push: %v", r)
	}
	_, families = s.scrape()
	if now := families["pando_remote_last_push_timestamp_seconds"].GetMetric()[0].GetGauge().GetValue(); now <= before {
		t.Errorf("the push of an unchanged volume: %f, before %f", now, before)
	}

	// No secret, and nothing that tells where the remote is.
	r, err := replicate.Load(s.e.Dir(), "backup", replicate.Access{})
	must(t, err)
	identity, err := os.ReadFile(r.IdentityFile())
	must(t, err)
	for _, secret := range []string{r.URL, strings.TrimSpace(string(identity)), "AGE-SECRET"} {
		if strings.Contains(text, secret) {
			t.Errorf("the metrics have %q", secret)
		}
	}
}

// TestMetricsOfVolumes: without the option no volume has metrics of its own.
func TestMetricsOfVolumes(t *testing.T) {
	s := withGolden(t, plain.Name)
	_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job"})
	must(t, err)
	text, err := s.c.Metrics(t.Context())
	if err != nil || !strings.Contains(text, "pando_objects") || strings.Contains(text, "pando_volume") ||
		strings.Contains(text, "job") {
		t.Errorf("got %v, %s", err, text)
	}
}

// TestGoldensAreLimited: a pool with very many goldens does not have very many series.
func TestGoldensAreLimited(t *testing.T) {
	goldens := map[string]*engine.GoldenTotals{}
	for i := range maxMetricsGoldens + 7 {
		name := fmt.Sprint("g", i)
		goldens[name] = &engine.GoldenTotals{Name: name, CurrentAt: time.Unix(int64(i+1), 0)}
	}
	goldens["g0"].Clones.Objects = 1
	r := &reading{}
	r.pool.Totals.Goldens = goldens

	out := make(chan prometheus.Metric, 20*maxMetricsGoldens)
	r.sendGoldens(out)
	close(out)
	clones, names := 0, map[string]bool{}
	for m := range out {
		var d dto.Metric
		must(t, m.Write(&d))
		if m.Desc() == descGoldensOmitted && d.GetGauge().GetValue() != 7 {
			t.Errorf("omitted: %v", d.GetGauge().GetValue())
		}
		if m.Desc() == descGoldenClones {
			clones++
			names[d.GetLabel()[0].GetValue()] = true
		}
	}
	if clones != maxMetricsGoldens || !names["g0"] || names["g1"] || !names["g8"] {
		t.Errorf("%d goldens", clones)
	}
}

// TestMetricsListener: everybody on the host can read metrics there, and do nothing else.
func TestMetricsListener(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	l, err := ListenMetrics("127.0.0.1:0")
	must(t, err)
	server := s.newServer(l)
	go server.Serve(l)
	defer server.Close()

	for _, c := range []struct {
		method, path, host string
		status             int
	}{
		{"GET", "/metrics", "", 200},
		{"HEAD", "/metrics", "localhost", 200},
		{"POST", "/metrics", "", 405},
		{"GET", "/v1/volumes", "", 404},
		{"POST", "/v1/gc", "", 404},
		{"GET", "/", "", 404},
		{"GET", "/metrics", "evil.example", 421},
	} {
		r, err := http.NewRequest(c.method, "http://"+l.Addr().String()+c.path, nil)
		must(t, err)
		r.Host = c.host
		resp, err := http.DefaultClient.Do(r)
		must(t, err)
		b, err := io.ReadAll(resp.Body)
		must(t, err, resp.Body.Close())
		read := c.status == 200 && c.method == "GET"
		if resp.StatusCode != c.status || read && !strings.Contains(string(b), "pando_objects{") {
			t.Errorf("%s %s at %q: status %d: %s", c.method, c.path, c.host, resp.StatusCode, b)
		}
	}

	for _, bad := range []string{"0.0.0.0:0", ":0", "nonsense"} {
		if l, err := ListenMetrics(bad); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v, %v", bad, l, err)
		}
	}
}

// TestScrapeOfAPoolThatHangs: a scrape ends in time, says what it lacks, and has the rest. Scrapes at the same time
// wait for the same reading.
func TestScrapeOfAPoolThatHangs(t *testing.T) {
	freshScrapes(t)
	s := withGolden(t, plain.Name)
	before := scrapeTimeout
	scrapeTimeout = 200 * time.Millisecond
	t.Cleanup(func() { scrapeTimeout = before })

	// Nobody writes into this pipe, so reading it hangs.
	dir := filepath.Join(s.e.Dir(), "remotes", "stuck")
	must(t, os.MkdirAll(dir, 0o700))
	pipe := filepath.Join(dir, "remote.json")
	must(t, unix.Mkfifo(pipe, 0o600))

	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			s.expect(map[string]string{
				"pando_scrape_success part=catalogue": "0", "pando_scrape_success part=remotes": "0",
				"pando_objects kind=generation": "none",
				"pando_event_streams":           "0",
			})
		})
	}
	wg.Wait()
	first := s.metrics.pool.read()
	if again := s.metrics.pool.read(); again != first {
		t.Error("a second reading has begun while the first one hangs")
	}

	// It goes on, and finds that the remote is damaged.
	w, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	must(t, err)
	must(t, os.Remove(pipe), os.WriteFile(pipe, []byte("{"), 0o600))
	_, err = w.WriteString("{")
	must(t, err, w.Close())
	<-first.done
	scrapeTimeout = before
	s.expect(map[string]string{
		"pando_scrape_success part=catalogue": "1", "pando_scrape_success part=remotes": "0",
		"pando_objects kind=generation": "1",
	})
}
