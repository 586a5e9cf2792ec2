package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/observe/syncbench"
	"pando/internal/testing/testfs"
)

// benchSync runs a command line, and returns its exit code and what it printed.
func benchSync(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errors bytes.Buffer
	a := &App{Version: "test", Stdout: &out, Stderr: &errors}
	code = a.Run(t.Context(), append([]string{"--pool", filepath.Join(t.TempDir(), "none"), "bench"}, args...))
	return code, out.String(), errors.String()
}

func needFio(t *testing.T) {
	t.Helper()
	switch _, err := exec.LookPath("fio"); {
	case os.Geteuid() != 0:
		t.Skip("SKIPPED: filesystems to measure are mounted: run the tests as root")
	case err != nil:
		t.Skip("SKIPPED: there is no fio: run make deps")
	}
}

// TestBenchSyncOfALiar measures an ext4 that does not flush, and the same one when it does.
func TestBenchSyncOfALiar(t *testing.T) {
	needFio(t)
	dir := testfs.Ext4(t, 1<<30)
	remount := func(option string) {
		if out, err := exec.Command("mount", "-o", "remount,"+option, dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	page := filepath.Join(t.TempDir(), "page.html")
	if err := os.WriteFile(page, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	line := []string{"sync", dir, "--quick", "--time", "2s", "--size", "256M", "--html", page}

	remount("barrier=0")
	code, out, errors := benchSync(t, append(line, "--json")...)
	var r syncbench.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, errors)
	}
	if code != exitUnproven || r.Verdict.Result != syncbench.Failed || !strings.Contains(r.Verdict.Layer, "ext4 on "+dir) {
		t.Errorf("exit code %d, %+v", code, r.Verdict)
	}
	if _, err := syncbench.Parse([]byte(out), "what it printed"); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile(page)
	if err != nil || !bytes.Contains(b, []byte("✗ FAIL at ext4 on "+dir)) ||
		!bytes.Contains(b, []byte("A quick run, no verdict on speed")) {
		t.Errorf("the page: %v", err)
	}
	if st, err := os.Stat(page); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the page is not as readable as the old one was: %v, %v", st.Mode(), err)
	}
	code, out, _ = benchSync(t, line...)
	if code != exitUnproven || !strings.Contains(strings.Join(strings.Fields(out), " "), " FAIL at ext4 on "+dir+": ") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	// The last words are the verdict's.
	if i, j := strings.Index(out, "FAIL at"), strings.LastIndex(out, "\n\n"); i < j {
		t.Errorf("something comes after the verdict:\n%s", out)
	}

	remount("barrier=1")
	saved := filepath.Join(t.TempDir(), "good.json")
	code, out, errors = benchSync(t, append(line, "--json", "--runs", "2")...)
	if err := os.WriteFile(saved, []byte(out), 0o600); err != nil {
		t.Fatal(err)
	}
	good, err := syncbench.Read(saved)
	if err != nil {
		t.Fatalf("%v\n%s", err, errors)
	}
	// What is below the loop device may lie, which this test cannot help.
	for _, x := range good.Runs {
		if l := x.Proof.Layers[0]; !strings.Contains(l.Name, dir) || l.Result == "fail" {
			t.Errorf("%+v", l)
		}
	}
	if want := map[string]int{syncbench.Pass: 0, syncbench.Failed: exitUnproven}[good.Verdict.Result]; code != want {
		t.Errorf("exit code %d with %s", code, good.Verdict.Result)
	}
	// Other commands read it.
	if code, out, errors = benchSync(t, "report", saved); code != 0 || !strings.Contains(out, "\n"+good.Verdict.Result) {
		t.Errorf("report: exit code %d\n%s%s", code, out, errors)
	}
	if code, out, errors = benchSync(t, "compare", saved, saved); code != 0 ||
		!strings.Contains(out, "Result: no change beyond noise") {
		t.Errorf("compare: exit code %d\n%s%s", code, out, errors)
	}
	for l := range strings.Lines(out) {
		if n := len([]rune(strings.TrimRight(l, "\n"))); n > syncWidth && !strings.Contains(l, saved) {
			t.Errorf("%d columns: %s", n, l)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 1 || filepath.Base(left[0]) != "lost+found" {
		t.Errorf("it leaves %q", left)
	}
	if left, err = filepath.Glob(filepath.Join(filepath.Dir(page), ".*")); err != nil || len(left) != 0 {
		t.Errorf("it leaves %q", left)
	}
}

const fixture = "../../observe/syncbench/testdata/report.json"

// TestBenchReportText: what a person reads has all figures, in 80 columns.
func TestBenchReportText(t *testing.T) {
	for locale, bars := range map[string]string{"C.UTF-8": "▁▁▁▁▃▂", "C": "____,."} {
		t.Setenv("LC_ALL", locale)
		code, out, errors := benchSync(t, "report", fixture)
		if code != 0 || errors != "" {
			t.Fatalf("%d: %s", code, errors)
		}
		for _, want := range []string{
			"path     /srv/db\nlayers   ext4 on / > vda\n", "1    5,533    5,533     120 us   268 us  1.25 ms  4.55 ms  53.3 " +
				"ms\n",
			"run 1   " + bars, "        !!!!!!\n", "        0 to 1 s: 1 s at 11 % of the median rate",
			" vda       700,229  700,265  0    36       700,229  5.3 GiB  ok\n", "\nPASS: every sync reached the disk vda\n",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: it does not say %q:\n%s", locale, want, out)
			}
		}
		for l := range strings.Lines(out) {
			if n := len([]rune(strings.TrimRight(l, "\n"))); n > syncWidth {
				t.Errorf("%d columns: %s", n, l)
			}
			if locale == "C" && strings.ContainsFunc(l, func(r rune) bool { return r > 126 }) {
				t.Errorf("not ASCII: %s", l)
			}
		}
	}
}

func TestSpark(t *testing.T) {
	run := &syncbench.Run{Stalls: []syncbench.Stall{{From: 50, To: 51}}}
	for i := range 100 {
		run.Timeline = append(run.Timeline, syncbench.Moment{At: float64(i + 1), Length: 1, Syncs: float64(i)})
	}
	// A stall of one second is seen, however many seconds a column has.
	if bars, marks := drawSparkline(run, 99, 10, false); bars != "_..,-=+**#" || marks != "     !" {
		t.Errorf("%q %q", bars, marks)
	}
	if bars, _ := drawSparkline(run, 99, 8, true); bars != "▁▂▃▄▅▆▇█" {
		t.Errorf("%q", bars)
	}
	if bars, marks := drawSparkline(&syncbench.Run{}, 0, 10, true); bars+marks != "" {
		t.Errorf("%q %q", bars, marks)
	}
}
