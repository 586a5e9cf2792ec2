// Package requests checks that all requests are plain data, so that a service can get them from another process.
package requests

import (
	"encoding"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/observe/diagnose"
	"pando/internal/observe/doctor"
	"pando/internal/remote/replicate"
	"pando/internal/service/listing"
	"pando/internal/service/restore"
	"pando/internal/service/users"
	"pando/internal/source/git"
)

// requests has each type of a request. TestRequestsArePlainData finds those that are missing.
var requests = []any{
	engine.CloneRequest{}, engine.DeinitRequest{}, engine.DestroyRequest{}, engine.DiffRequest{}, engine.ExpireRequest{},
	engine.ExportRequest{},
	engine.FlattenRequest{}, engine.GCRequest{}, engine.HistoryRequest{}, engine.ImportRequest{}, engine.InitRequest{},
	engine.KeepRequest{}, engine.LabelRequest{}, engine.MountRequest{}, engine.PinRequest{}, engine.PoolRequest{},
	engine.PoolResizeRequest{}, engine.PruneRequest{}, engine.PublishRequest{}, engine.ReadRequest{},
	engine.RebaseRequest{}, engine.ReceiveRequest{}, engine.RenameRequest{}, engine.ResizeRequest{},
	engine.RewindRequest{}, engine.RunRequest{}, engine.SetRequest{}, engine.SnapshotRequest{}, engine.UmountRequest{},
	engine.VolumesRequest{}, check.Request{},
	replicate.AddRequest{}, replicate.KitRequest{}, replicate.PruneRequest{}, replicate.PullRequest{},
	replicate.PushRequest{}, replicate.RemoveRequest{}, replicate.RepairRequest{}, replicate.VerifyRequest{},
	engine.MatchRequest{}, listing.Request{}, restore.Request{},
	users.CloneRequest{},
	git.CheckoutRequest{}, git.ImportRequest{}, git.RefreshRequest{},
	doctor.HostRequest{}, doctor.ZFSRequest{}, diagnose.Request{},
}

// TestRequestsArePlainData: what is sent as JSON arrives as it was. There are no functions, files, or hidden fields.
func TestRequestsArePlainData(t *testing.T) {
	listed := map[string]bool{}
	for _, q := range requests {
		was := reflect.New(reflect.TypeOf(q)).Elem()
		name := was.Type().String()
		listed[name] = true
		fill(t, name, was)
		if t.Failed() {
			continue
		}
		b, err := json.Marshal(was.Interface())
		is := reflect.New(was.Type())
		if err == nil {
			err = json.Unmarshal(b, is.Interface())
		}
		if err != nil || !reflect.DeepEqual(is.Elem().Interface(), was.Interface()) {
			t.Errorf("%s: %v, %+v arrives as %+v", name, err, was, is.Elem())
		}
	}

	for _, dir := range []string{"engine", "engine/check", "remote/replicate", "source/git", "service/listing",
		"service/restore", "observe/doctor", "observe/diagnose"} {
		for _, name := range requestsIn(t, "../../internal/"+dir) {
			if name = filepath.Base(dir) + "." + name; !listed[name] {
				t.Errorf("%s is not in the list", name)
			}
		}
	}
}

// requestsIn returns the names of the exported types of requests in a package.
func requestsIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%v in %s", err, dir)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if x, ok := n.(*ast.TypeSpec); ok && x.Name.IsExported() && strings.HasSuffix(x.Name.Name, "Request") {
				names = append(names, x.Name.Name)
			}
			return true
		})
	}
	return names
}

// fill gives a value, and all that is in it, a content other than the zero one. It fails the test if that is no plain
// data.
func fill(t *testing.T, name string, v reflect.Value) {
	t.Helper()
	switch x := v.Addr().Interface().(type) {
	case *time.Time:
		*x = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
		return
	case *json.RawMessage:
		*x = json.RawMessage(`{"a":"b"}`)
		return
	case *driver.Labels:
		*x = driver.StoredLabels(`{"a":"b"}`)
		return
	case *driver.LabelSelector:
		var err error
		if *x, err = driver.ParseLabelSelector("", "a=b*", "c"); err != nil {
			t.Error(err)
		}
		return
	case encoding.TextUnmarshaler:
		if err := x.UnmarshalText([]byte("web")); err != nil {
			t.Error(err)
		}
		return
	}

	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(7)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(7)
	case reflect.Float64:
		v.SetFloat(7.5)
	case reflect.String:
		v.SetString("text")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, name, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, name+"[0]", v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, name, key)
		fill(t, name, value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if !f.IsExported() {
				t.Errorf("%s.%s would not arrive", name, f.Name)
				continue
			}
			fill(t, name+"."+f.Name, v.Field(i))
		}
	default:
		t.Errorf("%s is a %s, and no plain data", name, v.Type())
	}
}
