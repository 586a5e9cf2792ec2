package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/client"

	dto "github.com/prometheus/client_model/go"
)

const (
	alertsFile    = "../../../contrib/prometheus/alerts.yml"
	dashboardFile = "../../../contrib/grafana/pando.json"
	metricsPage   = "../../../docs/metrics.md"
)

// tool finds a program of Debian's package prometheus.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("SKIPPED: %v: install the package prometheus", err)
	}
	return path
}

// promtool runs promtool in the directory of the alerts.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), tool(t, "promtool"), args...)
	cmd.Dir, cmd.Stdin = filepath.Dir(alertsFile), strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

var pandoMetric = regexp.MustCompile(`\bpando_[a-z0-9_]+`)

// panel is a panel of the dashboard.
type panel struct {
	Title   string
	Targets []struct{ Expr string }
}

// dashboard reads the dashboard.
func dashboard(t *testing.T) (text string, panels []panel) {
	t.Helper()
	b, err := os.ReadFile(dashboardFile)
	must(t, err)
	var d struct{ Panels []panel }
	must(t, json.Unmarshal(b, &d))
	if len(d.Panels) < 15 {
		t.Fatalf("only %d panels", len(d.Panels))
	}
	return string(b), d.Panels
}

// TestPromtool checks a scrape of a busy service, the alerts, and the example of a configuration.
func TestPromtool(t *testing.T) {
	tool(t, "promtool")
	s := busy(t)
	text, families := s.scrape()
	promtool(t, text, "check", "metrics")
	promtool(t, "", "check", "rules", "--lint-fatal", filepath.Base(alertsFile))
	promtool(t, "", "test", "rules", "alerts_test.yml")
	promtool(t, "", "check", "config", "--syntax-only", "prometheus.yml")

	// Dashboard and alerts name only metrics that exist, and each alert has a test.
	alerts, err := os.ReadFile(alertsFile)
	must(t, err)
	tests, err := os.ReadFile(filepath.Join(filepath.Dir(alertsFile), "alerts_test.yml"))
	must(t, err)
	board, _ := dashboard(t)
	named := pandoMetric.FindAllString(board+string(alerts)+string(tests), -1)
	for _, name := range named {
		if families[name] == nil && families[strings.TrimSuffix(name, "_bucket")] == nil {
			t.Errorf("%s is not in a scrape", name)
		}
	}
	if len(named) < 50 {
		t.Errorf("only %d names found", len(named))
	}
	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(alerts), -1) {
		if !strings.Contains(string(tests), "alertname: "+m[1]+"\n") {
			t.Errorf("no test of %s", m[1])
		}
	}
}

// prometheus runs a Prometheus that scrapes a service, until the end of the test, and returns its address.
func runPrometheus(t *testing.T, target string) string {
	t.Helper()
	program := tool(t, "prometheus")
	rules, err := filepath.Abs(alertsFile)
	must(t, err)
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `global: {scrape_interval: 250ms, evaluation_interval: 250ms}
rule_files: [%q]
scrape_configs: [{job_name: pando, static_configs: [{targets: [%q]}]}]
`, rules, target), 0o644))

	// A free port.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	address := l.Addr().String()
	must(t, l.Close())

	log, err := os.Create(filepath.Join(dir, "log"))
	must(t, err)
	defer log.Close()
	cmd := exec.Command(program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		err := cmd.Wait()
		if b, rerr := os.ReadFile(log.Name()); t.Failed() && rerr == nil {
			t.Logf("prometheus: %v: %s", err, b)
		}
	})
	return address
}

// ask asks a Prometheus for something, and returns the data of its answer.
func ask(ctx context.Context, address, path string, data any) error {
	r, err := http.NewRequestWithContext(ctx, "GET", "http://"+address+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.Unmarshal(b, &answer); err != nil {
		return fmt.Errorf("%w: %s", err, b)
	}
	if answer.Status != "success" {
		return errors.New(answer.Error)
	}
	return nil
}

// TestDashboard: a real Prometheus that scrapes a busy service has data for every query of the dashboard, and can
// evaluate every alert.
func TestDashboard(t *testing.T) {
	tool(t, "prometheus")
	s := busy(t)
	l, err := ListenMetrics("127.0.0.1:0")
	must(t, err)
	server := s.newServer(l)
	go server.Serve(l)
	defer server.Close()
	address := runPrometheus(t, l.Addr().String())

	// All queries, with the variables of Grafana replaced.
	queries := map[string]string{}
	_, panels := dashboard(t)
	variables := strings.NewReplacer("$__rate_interval", "1m", "$instance", ".*")
	for _, p := range panels {
		for _, target := range p.Targets {
			queries[variables.Replace(target.Expr)] = p.Title
		}
	}

	// Go on working, so that rates are not 0, until there is an answer to each query.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	quiet := "pando_maintenance_errors_total" // maintenance does not fail here
	for len(queries) > 0 && ctx.Err() == nil {
		_, err := s.c.Volume(ctx, "nix")
		want(t, "an unknown volume", err, client.NotFound, http.StatusNotFound)
		op, err := s.c.GC(ctx)
		done[any](s, op, err)
		must(t, s.cycle("more"))

		for q, title := range queries {
			var found struct{ Result []any }
			switch err := ask(ctx, address, "/api/v1/query?query="+url.QueryEscape(q), &found); {
			case err == nil && (len(found.Result) > 0 || strings.Contains(q, quiet)):
				delete(queries, q)
			case err != nil && !errors.As(err, new(*url.Error)): // it has not started yet
				t.Errorf("%s: %s: %v", title, q, err)
				delete(queries, q)
			}
		}
	}
	for _, q := range slices.Sorted(maps.Keys(queries)) {
		t.Errorf("%s: no data for %s", queries[q], q)
	}

	// All alerts can be evaluated.
	var rules struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	must(t, ask(ctx, address, "/api/v1/rules", &rules))
	n := 0
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if n++; r.Health != "ok" {
				t.Errorf("%s: %s %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	if n < 10 {
		t.Errorf("only %d rules", n)
	}
}

// TestMetricsAreDocumented holds docs/metrics.md against a scrape of a busy service. PANDO_UPDATE=1 writes the table.
func TestMetricsAreDocumented(t *testing.T) {
	s := busy(t)
	_, families := s.scrape()
	for _, d := range poolDescs {
		name, _, _ := strings.Cut(strings.TrimPrefix(d.String(), `Desc{fqName: "`), `"`)
		if families[name] == nil {
			t.Errorf("%s is not in a scrape of a busy service", name)
		}
	}

	b, err := os.ReadFile(metricsPage)
	must(t, err)
	const begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->"
	before, rest, ok := strings.Cut(string(b), begin)
	table, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no table between %q and %q", metricsPage, begin, end)
	}
	fresh := metricsTable(families)
	switch {
	case table == fresh || t.Failed():
	case os.Getenv("PANDO_UPDATE") != "":
		must(t, os.WriteFile(metricsPage, []byte(before+begin+fresh+end+after), 0o644))
	default:
		t.Errorf("the table of %s is not that of this program: run PANDO_UPDATE=1 make test "+
			"PKG=./internal/front/service RUN=TestMetricsAreDocumented; it should be\n%s", metricsPage, fresh)
	}
}

// metricsTable describes Pando's own metrics in Markdown.
func metricsTable(families map[string]*dto.MetricFamily) string {
	var b strings.Builder
	b.WriteString("\n| metric | type | labels | what |\n| --- | --- | --- | --- |\n")
	for _, name := range slices.Sorted(maps.Keys(families)) {
		if !strings.HasPrefix(name, "pando_") {
			continue
		}
		f := families[name]
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, strings.ToLower(f.GetType().String()),
			strings.Join(labels, ", "), f.GetHelp())
	}
	b.WriteString("\n")
	return b.String()
}
