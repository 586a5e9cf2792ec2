package objdir_test

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
)

// golden are identities. Their files in testdata are never changed: pools hold such bytes.
var golden = map[string]driver.Identity{
	"minimal": {
		ID: "000000000000000000000000g0", Kind: driver.Scratch, FS: driver.None,
		CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), BootID: "b",
	},
	"volume": {
		ID: "0123456789abcdefghijklmnog", Kind: driver.Volume, Name: "agent-7.work_tree", FS: driver.Ext4,
		SizeBytes: 107374182400,
		Origin:    "web@3", OriginID: "vutsrqponmlkjihgfedcba9874",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 123456789, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
	},
	"ephemeral": {
		ID: "00000000000000000000000008", Kind: driver.Volume, Name: "run", FS: driver.XFS, SizeBytes: 1 << 29,
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), ExpiresAt: time.Date(2026, 3, 4, 7, 6, 7, 500, time.UTC),
		Ephemeral: true, BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
	},
	"snapshot": {
		ID: "0000000000000000000000000c", Kind: driver.Snapshot, Name: "before", Volume: "0123456789abcdefghijklmnog",
		FS:     driver.Native,
		Origin: "agent-7.work_tree", OriginID: "0123456789abcdefghijklmnog",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
	},
	"generation": {
		ID: "0000000000000000000000000g", Kind: driver.Generation, Golden: "web", Generation: 42, FS: driver.Ext4,
		SizeBytes: 1 << 40,
		Origin:    "build-41", OriginID: "0000000000000000000000000k",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
	},
	"rewound": {
		ID: "0000000000000000000000001g", Kind: driver.Volume, Name: "job", Golden: "web", Generation: 3,
		Volume: "0123456789abcdefghijklmnog", FS: driver.Ext4,
		SizeBytes: 1 << 30, Sector: 4096, Origin: "job@before", OriginID: "0000000000000000000000000c",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		Pinned: driver.Forever, Replaces: "0123456789abcdefghijklmnog", Before: "before-rewind-20260304T050607.000Z",
		Order: 1772600767000000001,
	},
	"current": {
		ID: "0000000000000000000000002g", Kind: driver.Generation, Golden: "web", Generation: 7, FS: driver.XFS,
		SizeBytes: 1 << 40, Sector: 512,
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		GoldenProperties: driver.GoldenProperties{Keep: 3}, Since: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
	},
	"never-overlay": {
		ID: "0000000000000000000000007g", Kind: driver.Generation, Golden: "db", Generation: 2, FS: driver.Ext4,
		SizeBytes: 1 << 30, Sector: 512, Origin: "job", OriginID: "0000000000000000000000001g",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		GoldenProperties: driver.GoldenProperties{Overlay: driver.OverlayNever},
	},
	"labels": {
		ID: "0000000000000000000000008g", Kind: driver.Volume, Name: "job", Golden: "web", Generation: 7, FS: driver.Ext4,
		SizeBytes: 1 << 30, Sector: 512, Origin: "web@7", OriginID: "0000000000000000000000002g",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		GoldenProperties: driver.GoldenProperties{Labels: driver.StoredLabels(`{"note":"a \"<b>\" é","team":"search"}`)},
	},
	"owned": {
		ID: "0000000000000000000000009g", Kind: driver.Volume, Name: "job", FS: driver.Native,
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		Owner: 4294967294,
	},
	"pinned": {
		ID: "0000000000000000000000003g", Kind: driver.Snapshot, Name: "s", Golden: "web", Generation: 7,
		Volume: "0123456789abcdefghijklmnog", FS: driver.Native,
		Origin: "job", OriginID: "0000000000000000000000001g",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		Consistency: driver.Crash, Pinned: time.Date(2026, 3, 5, 5, 6, 7, 0, time.UTC), Order: 1772600767000000000,
	},
	"overlay": {
		ID: "0000000000000000000000004g", Kind: driver.Volume, Name: "agent", Golden: "web", Generation: 7, FS: driver.Ext4,
		SizeBytes: 1 << 30, Sector: 512, Origin: "web@7", OriginID: "0000000000000000000000002g",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		Lower: "0000000000000000000000002g",
	},
	"overlay-snapshot": {
		ID: "0000000000000000000000005g", Kind: driver.Snapshot, Name: "s", Golden: "web", Generation: 7,
		Volume: "0000000000000000000000004g", FS: driver.Native, Origin: "agent", OriginID: "0000000000000000000000004g",
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
		Lower: "0000000000000000000000002g", Consistency: driver.Clean,
	},
	"layer": {
		ID: "0000000000000000000000002g", Kind: driver.Layer, Golden: "web", Generation: 7, FS: driver.XFS,
		SizeBytes: 1 << 40, Sector: 512,
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
	},
	"template": {
		ID: "0000000000000000000000006g", Kind: driver.Layer, Name: "upper layer ext4 1073741824", FS: driver.Ext4,
		SizeBytes: 1 << 30, Sector: 512,
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), BootID: "5f9d1b3a-8f5e-4f0c-9a55-0a4b8f9f3c11",
	},
}

// TestGoldenFiles holds the files against what they mean, and against what is written now. PANDO_UPDATE=1 writes them,
// for a new version.
func TestGoldenFiles(t *testing.T) {
	const dir = "testdata/v1"
	if os.Getenv("PANDO_UPDATE") != "" {
		update(t, dir, golden)
	}
	files, err := filepath.Glob(dir + "/*.json")
	if err != nil || len(files) != len(golden) {
		t.Errorf("%s: %d files for %d identities, %v", dir, len(files), len(golden), err)
	}
	for name, id := range golden {
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join(dir, name+".json"))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := objdir.Decode(text); err != nil || !reflect.DeepEqual(got, written(id)) {
				t.Errorf("read as %+v, %v\nwant %+v", got, err, written(id))
			}
			d := open(t, t.TempDir())
			if err := d.Put(id, objdir.InMemory); err != nil {
				t.Fatal(err)
			}
			if file := metaText(t, d, id.ID); file != string(text) {
				t.Errorf("written as %s\nwant       %s", file, text)
			}
		})
	}
}

func update(t *testing.T, dir string, golden map[string]driver.Identity) {
	t.Helper()
	for name, id := range golden {
		b, err := objdir.Encode(id, pool)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name+".json"), append(b, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	files, err := filepath.Glob("testdata/v1/*.json")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)/2])
		f.Add(bytes.Replace(b, []byte(`"v":1`), []byte(`"v":3`), 1))
		f.Add(bytes.ToUpper(b))
	}
	for _, s := range []string{"", "{}", "null", "[]", `{"v":1}`, `{"v":1e0}`, `{"v":99999999999999999999}`,
		`{"v":1,"id":"\u0000"}`, `{"v":1,"V":2}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := objdir.Decode(b)
		if err != nil {
			if k := errs.KindOf(err); k != errs.Damaged && k != errs.TooNew {
				t.Errorf("error of kind %q: %v", k, err)
			}
			if id != (driver.Identity{}) {
				t.Errorf("refused, but %+v", id)
			}
			return
		}
		if !driver.ValidID(string(id.ID)) || id.SizeBytes < 0 || id.Generation < 0 || id.Version != 1 {
			t.Errorf("accepted %+v", id)
		}
		again, err := objdir.Encode(id, id.Pool)
		if err != nil {
			if errs.Is(err, errs.Invalid) {
				return // longer than it may be, or text that JSON does not keep as it is
			}
			t.Fatalf("%+v cannot be written: %v", id, err)
		}
		back, err := objdir.Decode(again)
		if err != nil {
			t.Fatalf("%s cannot be read again: %v", again, err)
		}
		if !id.CreatedAt.Equal(back.CreatedAt) || !id.ExpiresAt.Equal(back.ExpiresAt) {
			t.Errorf("times %v, %v became %v, %v", id.CreatedAt, id.ExpiresAt, back.CreatedAt, back.ExpiresAt)
		}
		if !id.Pinned.Equal(back.Pinned) || !id.Since.Equal(back.Since) {
			t.Errorf("times %v, %v became %v, %v", id.Pinned, id.Since, back.Pinned, back.Since)
		}
		back.CreatedAt, back.ExpiresAt, back.Pinned, back.Since = id.CreatedAt, id.ExpiresAt, id.Pinned, id.Since
		if back != id {
			t.Errorf("%+v became %+v", id, back)
		}
	})
}
