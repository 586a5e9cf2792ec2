package python

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

const document = "../../api/openapi.json"

// fuzzed is a running service on a pool that is thrown away.
type fuzzed struct {
	t                       *testing.T
	dir, pool, url, token   string
	tokens, mounts, archive string
	log                     *os.File
}

// command runs a command of the pool.
func (f *fuzzed) command(arguments ...string) string {
	f.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(pando, append([]string{"--pool", f.pool}, arguments...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		f.t.Fatalf("%v: %v: %s", arguments, err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// serveForFuzzing starts a service that listens on a loopback address, for callers with a token, who may do everything.
func serveForFuzzing(t *testing.T) *fuzzed {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	f := &fuzzed{t: t, dir: dir, pool: at("pool"), tokens: at("tokens"), mounts: at("mounts"), archive: at("site.tar")}
	script := `cd "$1" && mkdir site remote && echo v1 >site/index.html && tar -cf site.tar -C site . &&
		umask 077 && echo correct horse >passphrase`
	if out, err := exec.Command("bash", "-euc", script, "bash", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	f.command("init", "-q", "--size", "2G")
	f.command("remote", "add", "store", "file:"+at("remote"), "--passphrase-file", at("passphrase"))
	f.token = f.command("serve", "token", "fuzz", "--token-file", f.tokens)
	address := freeAddress(t)
	f.url = "http://" + address

	var err error
	if f.log, err = os.Create(at("log")); err != nil {
		t.Fatal(err)
	}
	service := exec.Command(pando, "--pool", f.pool, "serve", "--socket", at("sock"), "--listen", address,
		"--token-file", f.tokens)
	service.Stderr = f.log
	runtime.LockOSThread() // for the rest of the test: the service dies with its thread
	service.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := service.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.end(service) })
	if !wait(t.Context(), 30*time.Second, func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}) {
		t.Fatal("the service does not listen")
	}
	return f
}

// freeAddress returns an address that nobody listens on. In the network namespace of the test nobody will.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// end ends the service: it must still be able to do so, without a panic, and the pool must be in order.
func (f *fuzzed) end(service *exec.Cmd) {
	_ = service.Process.Signal(syscall.SIGTERM)
	if err := service.Wait(); err != nil {
		f.t.Errorf("the service: %v", err)
	}
	log, err := os.ReadFile(f.log.Name())
	if err != nil || bytes.Contains(log, []byte("panic")) || bytes.Contains(log, []byte(f.token)) {
		f.t.Errorf("log: %v: %s", err, log)
	}
	_ = f.log.Close()

	if out, err := exec.Command(pando, "--pool", f.pool, "fsck").CombinedOutput(); err != nil {
		f.t.Errorf("fsck: %v: %s", err, out)
	}
	f.command("deinit", "--force")
}

// TestFuzz has schemathesis send all routes valid and invalid requests, and sequences of them. No answer may be a
// failure of the service, or be missing in the document. PANDO_SEED repeats the choices.
func TestFuzz(t *testing.T) {
	examples := 6 // of each route, besides those that the document leads to, and as many sequences
	if testfs.Full() {
		examples = 300
	}

	f := serveForFuzzing(t)
	hooks, err := filepath.Abs("fuzz")
	if err != nil {
		t.Fatal(err)
	}
	schema, err := filepath.Abs(document)
	if err != nil {
		t.Fatal(err)
	}
	report, answers := filepath.Join(f.dir, "report.xml"), filepath.Join(f.dir, "answers.json")
	arguments := []string{"st", "--config-file", filepath.Join(hooks, "schemathesis.toml"), "--no-color", "run", schema,
		"--url", f.url, "--max-examples", strconv.Itoa(examples), "--report", "junit", "--report-junit-path", report}
	if seed := os.Getenv("PANDO_SEED"); seed != "" {
		arguments = append(arguments, "--seed", seed)
	}
	cmd := python(t, arguments...)
	cmd.Dir = f.dir
	cmd.Env = append(os.Environ(), "SCHEMATHESIS_HOOKS=hooks", "PYTHONPATH="+hooks, "FUZZ_URL="+f.url,
		"FUZZ_TOKEN="+f.token, "FUZZ_MOUNTS="+f.mounts, "FUZZ_ARCHIVE="+f.archive, "FUZZ_ANSWERS="+answers)
	n := subtests(t, cmd, report)
	if routes := countRoutes(t); n < routes-2 { // two are streams
		t.Errorf("%d of %d routes were tried", n, routes)
	}
	checkAnswers(t, answers)
}

// checkAnswers reads how often each route had which status. If most had no success, the test has shown little.
func checkAnswers(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var answers map[string]map[string]int
	if err := json.Unmarshal(text, &answers); err != nil {
		t.Fatal(err)
	}

	total, succeeded := 0, 0
	for _, route := range slices.Sorted(maps.Keys(answers)) {
		success := 0
		for status, n := range answers[route] {
			total += n
			if status < "300" {
				success += n
			}
		}
		if success > 0 {
			succeeded++
		}
		t.Logf("%-55s %v", route, answers[route])
	}
	t.Logf("%d requests of %d routes; %d of these succeeded", total, len(answers), succeeded)
	if succeeded < len(answers)*3/4 {
		t.Errorf("only %d of %d routes ever succeeded", succeeded, len(answers))
	}
}

// TestFuzzEvents sends the stream of events IDs of all kinds: each is a place, or an error that says so.
func TestFuzzEvents(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}

	f := serveForFuzzing(t)
	seed, _ := strconv.ParseUint(os.Getenv("PANDO_SEED"), 10, 64) // 0 without one
	random := rand.New(rand.NewPCG(seed, seed))
	alphabet := []string{"0", "1", "9", "f", "-", ".", ":", "/", "..", " ", "ä", "\x7f", "18446744073709551616", "%00",
		"e"}
	statuses := map[int]int{}
	for range 400 {
		id := ""
		for range random.IntN(6) {
			id += alphabet[random.IntN(len(alphabet))]
		}
		statuses[f.askEvents(id)]++
	}
	if len(statuses) != 2 || statuses[http.StatusOK] == 0 || statuses[http.StatusBadRequest] == 0 {
		t.Errorf("%v", statuses)
	}
}

// askEvents opens a stream of events after an ID, and returns the status.
func (f *fuzzed) askEvents(id string) int {
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+"/v1/events?after="+url.QueryEscape(id), nil)
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+f.token)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		f.t.Fatalf("%q: %v", id, err)
	}
	defer resp.Body.Close()

	if resp.StatusCode >= http.StatusBadRequest {
		var problem struct{ Kind string }
		if err := json.NewDecoder(resp.Body).Decode(&problem); err != nil || problem.Kind == "" {
			f.t.Errorf("%q: not a problem: %v", id, err)
		}
	}
	return resp.StatusCode
}

// countRoutes returns the number of routes in the document.
func countRoutes(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	return len(regexp.MustCompile(`"operationId":`).FindAll(text, -1))
}
