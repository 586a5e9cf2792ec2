package mcp_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/front/mcp"
)

// shell is the arguments of a run of a script.
func shell(volume, script string) args {
	return args{"volume": volume, "command": []string{"sh", "-c", script}}
}

// TestOutput: output is bounded, whatever a command writes, and text.
func TestOutput(t *testing.T) {
	s := serve(t, newPool(t))
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	var r command
	s.do(&r, "run", shell("a-v",
		`echo begin; head -c 20000000 /dev/zero | tr '\0' x; echo; echo end; printf '\377\033[2J' >&2`))
	if len(r.Stdout) > 70_000 || !strings.HasPrefix(r.Stdout, "begin\n") || !strings.HasSuffix(r.Stdout, "\nend\n") ||
		!strings.Contains(r.Stdout, "[... 19934475 bytes are left out here ...]") || r.Stderr != "\uFFFD\x1b[2J" {
		t.Errorf("%d bytes: %.20q ... %q, %q", len(r.Stdout), r.Stdout, r.Stdout[max(0, len(r.Stdout)-20):], r.Stderr)
	}

	// What a command leaves behind ends with it.
	begin := time.Now()
	s.do(&r, "run", shell("a-v", "sleep 1000 & echo started"))
	if r.Stdout != "started\n" || time.Since(begin) > time.Minute {
		t.Errorf("%+v after %s", r, time.Since(begin))
	}
}

// TestSandbox: a command sees nothing of the host but programs.
func TestSandbox(t *testing.T) {
	e := newPool(t)
	s := serve(t, e)
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	var r command
	s.do(&r, "run", shell("a-v", `ls "$1" /root; cat /etc/shadow; ls /sys/class/net; env; ls `+e.Dir()))
	if strings.Contains(r.Stdout, "eth") || strings.Contains(r.Stdout, "pool.json") ||
		!strings.Contains(r.Stdout, "PANDO_VOLUME=a-v\n") || !strings.Contains(r.Stderr, "/etc/shadow: No such file") {
		t.Errorf("%+v", r)
	}
	s.refused("not_found", "run", args{"volume": "a-v", "command": []string{"no-such-program"}})
	s.refused("invalid", "run", args{"volume": "a-v", "command": []string{}})
	for _, word := range []string{"a\x00b", strings.Repeat("x", 1<<20)} {
		if text := s.call(t.Context(), nil, "run", args{"volume": "a-v", "command": []string{"echo", word}}); text == "" {
			t.Errorf("a program ran with %.10q", word)
		}
	}
	s.refused("invalid", "run", args{"volume": "a-v", "command": []string{"true"}, "timeout_seconds": -1})
}

// TestTimeout: a timeout ends a command; the one of the server is the longest.
func TestTimeout(t *testing.T) {
	s := serve(t, newPool(t), func(o *mcp.Options) { o.Timeout = 300 * time.Millisecond })
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	for _, seconds := range []float64{0, 0.2, 1e300} {
		var r command
		s.do(&r, "run", args{"volume": "a-v", "command": []string{"sleep", "1000"}, "timeout_seconds": seconds})
		if r.Exit != 124 || !r.TimedOut {
			t.Errorf("%v: %+v", seconds, r)
		}
	}
}

// TestCancel: a call that the client cancels ends its command, and while one runs in a volume no other does.
func TestCancel(t *testing.T) {
	e := newPool(t)
	s := serve(t, e)
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan string, 1)
	go func() { ended <- s.call(ctx, nil, "run", shell("a-v", "touch running; sleep 1000")) }()
	await(t, func() bool { return exists(filepath.Join(at(t, e, "a-v"), "running")) })
	s.refused("in_use", "run", shell("a-v", "true"))
	cancel()
	<-ended
	await(t, func() bool { return s.call(t.Context(), nil, "run", shell("a-v", "true")) == "" })
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// await waits for a condition.
func await(t *testing.T, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not happen")
		}
	}
}
