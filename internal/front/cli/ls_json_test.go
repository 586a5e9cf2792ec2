package cli

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/driver"
	"pando/internal/remote/replicate"
)

// TestWriteObjects holds writeObjects to what the JSON package writes, whatever the fields of an object are.
func TestWriteObjects(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	texts := []string{"", "web", "web@3", "/var/lib/pando/mnt/a b", "/srv/\"x\"", `/a\b`, "/ä/ö", "/new\nline", "/<a>&",
		"/bad\xffutf8", "/\u2028"}
	labels := []string{"", `{"a":"b"}`, `{"a/b":"","c":"<\"é\\> & {}"}`}
	at := func() time.Time { return time.Unix(rng.Int64N(1<<33), rng.Int64N(1e9)).UTC() }

	// Give each field a value, or none.
	draw := func(f reflect.Value) {
		if rng.IntN(3) == 0 {
			return
		}
		switch f.Interface().(type) {
		case time.Time:
			f.Set(reflect.ValueOf(at()))
			return
		case *time.Time:
			x := at()
			f.Set(reflect.ValueOf(&x))
			return
		case driver.Labels:
			f.Set(reflect.ValueOf(driver.StoredLabels(labels[rng.IntN(len(labels))])))
			return
		}
		switch f.Kind() {
		case reflect.String:
			f.SetString(texts[rng.IntN(len(texts))])
		case reflect.Int, reflect.Int64:
			f.SetInt(rng.Int64())
		case reflect.Uint32:
			f.SetUint(uint64(rng.Uint32()))
		case reflect.Bool:
			f.SetBool(true)
		default:
			t.Fatalf("a field of type %s", f.Type())
		}
	}
	for n := range 40 {
		objects := make([]api.Object, n)
		for i := range objects {
			for _, f := range reflect.ValueOf(&objects[i]).Elem().Fields() {
				draw(f)
			}
		}
		var want, got bytes.Buffer
		a := &App{Stdout: &want}
		if err := a.printJSON(objects); err != nil {
			t.Fatal(err)
		}
		if err := writeObjects(&got, objects); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Bytes(), want.Bytes()) {
			t.Fatalf("got:\n%s\nwanted:\n%s", got.Bytes(), want.Bytes())
		}
	}
}

func BenchmarkObjectsOfManyVolumes(b *testing.B) {
	vols := make([]api.Object, 47_000)
	now := time.Now().UTC()
	for i := range vols {
		vols[i] = api.Object{Ref: fmt.Sprint("agent-", i), Name: fmt.Sprint("agent-", i),
			ID: "q3161k9bcjkrnpl094of2g36bo", Kind: "volume", FS: "ext4", Driver: "reflink",
			State: "idle", Origin: "web@1", Golden: "web", Generation: 1, CreatedAt: now, LastUsedAt: now, MeasuredAt: &now,
			SizeBytes: 32 << 30}
	}
	var out bytes.Buffer
	a := &App{Stdout: &out}
	for name, write := range map[string]func() error{
		"encoding/json": func() error { return a.printJSON(vols) },
		"writeObjects":  func() error { return writeObjects(&out, vols) },
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
		v := replicate.Listed{RemoteVolume: api.RemoteVolume{Name: "a \"points\": [] b", Kind: "volume",
			Points: []api.Point{}}}
		v.Operations = []api.Operation{{Op: "push"}}
		whole := v
		for i := range n {
			whole.Points = append(whole.Points, api.Point{Name: fmt.Sprint("<p&", i), CreatedAt: now, Keep: i > 0})
		}
		points := func(yield func(api.Point, error) bool) {
			for _, p := range whole.Points {
				if !yield(p, nil) {
					return
				}
			}
			v.Problem, v.IncompleteCount = "why", 3 // is known in the end
		}
		whole.Problem, whole.IncompleteCount = "why", 3
		for _, indent := range []string{"", "  "} {
			var want, got bytes.Buffer
			wanted := any(whole)
			if indent != "" {
				wanted = []replicate.Listed{whole}
			}
			if err := (&App{Stdout: &want}).printJSON(wanted); err != nil {
				t.Fatal(err)
			}
			v.Problem, v.IncompleteCount = "", 0
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
