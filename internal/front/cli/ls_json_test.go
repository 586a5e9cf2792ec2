package cli

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
)

// TestWriteInfos holds writeInfos to what the JSON package writes.
func TestWriteInfos(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	text := func() string {
		pool := []string{"", "web", "web@3", "/var/lib/pando/mnt/a b", "/srv/\"x\"", `/a\b`, "/ä/ö", "/new\nline", "/<a>&",
			"/bad\xffutf8", "/\u2028"}
		return pool[rng.IntN(len(pool))]
	}
	labels := []string{"", `{"a":"b"}`, `{"a/b":"","c":"<\"é\\> & {}"}`}
	at := func() time.Time { return time.Unix(rng.Int64N(1<<33), rng.Int64N(1e9)).UTC() }
	maybe := func() *time.Time {
		if rng.IntN(2) == 0 {
			return nil
		}
		x := at()
		return &x
	}
	for n := range 40 {
		vols := []engine.Info{}
		for range n {
			vols = append(vols, engine.Info{
				Name: text(), ID: text(), Kind: engine.Kind(text()), FS: driver.FS(text()), Driver: text(),
				State: engine.State(text()), Origin: text(), Golden: text(),
				Generation: rng.IntN(9), Mountpoint: text(), CreatedAt: at(), LastUsedAt: at(), ExpiresAt: maybe(),
				Ephemeral: rng.IntN(2) == 0,
				SizeBytes: rng.Int64(), LogicalBytes: rng.Int64(), ExclusiveBytes: rng.Int64(), SharedBytes: rng.Int64(),
				Extents: rng.Int64(), MeasuredAt: maybe(), Labels: driver.StoredLabels(labels[rng.IntN(len(labels))]),
			})
		}
		var want, got bytes.Buffer
		a := &App{Stdout: &want}
		if err := a.printJSON(vols); err != nil {
			t.Fatal(err)
		}
		if err := writeInfos(&got, vols); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Bytes(), want.Bytes()) {
			t.Fatalf("got:\n%s\nwanted:\n%s", got.Bytes(), want.Bytes())
		}
	}
}

func BenchmarkInfosOfManyVolumes(b *testing.B) {
	vols := make([]engine.Info, 47_000)
	now := time.Now().UTC()
	for i := range vols {
		vols[i] = engine.Info{Name: fmt.Sprint("agent-", i), ID: "q3161k9bcjkrnpl094of2g36bo", Kind: "volume", FS: "ext4",
			Driver: "reflink",
			State:  "idle", Origin: "web@1", Golden: "web", Generation: 1, CreatedAt: now, LastUsedAt: now, MeasuredAt: &now,
			SizeBytes: 32 << 30}
	}
	var out bytes.Buffer
	a := &App{Stdout: &out}
	for name, write := range map[string]func() error{
		"encoding/json": func() error { return a.printJSON(vols) },
		"writeInfos":    func() error { return writeInfos(&out, vols) },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				out.Reset()
				if err := write(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestPrintVolume holds what is printed point by point to what the JSON package writes.
func TestPrintVolume(t *testing.T) {
	now := time.Unix(1700000000, 0).UTC()
	for n := range 3 {
		v := replicate.Listed{Name: "a \"points\": [] b", Kind: "volume", Points: []replicate.ListedPoint{}}
		v.Sessions = []replicate.ListedWork{{Kind: "push"}}
		whole := v
		for i := range n {
			whole.Points = append(whole.Points, replicate.ListedPoint{Name: fmt.Sprint("<p&", i), CreatedAt: now, Keep: i > 0})
		}
		points := func(yield func(replicate.ListedPoint, error) bool) {
			for _, p := range whole.Points {
				if !yield(p, nil) {
					return
				}
			}
			v.Problem, v.Incomplete = "why", 3 // is known in the end
		}
		whole.Problem, whole.Incomplete = "why", 3
		for _, indent := range []string{"", "  "} {
			var want, got bytes.Buffer
			wanted := any(whole)
			if indent != "" {
				wanted = []replicate.Listed{whole}
			}
			if err := (&App{Stdout: &want}).printJSON(wanted); err != nil {
				t.Fatal(err)
			}
			v.Problem, v.Incomplete = "", 0
			if err := (&App{Stdout: &got}).printVolume(&v, points, indent); err != nil {
				t.Fatal(err)
			}
			text := got.String()
			if indent != "" {
				text = "[\n  " + text + "\n]\n"
			}
			if text != want.String() {
				t.Errorf("got:\n%s\nwanted:\n%s", text, want.String())
			}
		}
	}
}
