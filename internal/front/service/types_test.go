package service

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/engine"
)

// fieldsOf lists the names of a type's fields in JSON, with their kinds.
func fieldsOf(t reflect.Type) map[string]reflect.Kind {
	out := map[string]reflect.Kind{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "-" {
			out[name] = f.Type.Kind()
		}
	}
	return out
}

// looseKinds are kinds that the client writes in another way: labels, messages, and JSON that it leaves as it is.
var looseKinds = []reflect.Kind{reflect.Struct, reflect.Map, reflect.Slice, reflect.Pointer, reflect.Interface}

// TestClientKnowsAllFields holds the types of the client against those of the service. The client may leave out fields
// of answers that are named here, and must have all fields of requests.
func TestClientKnowsAllFields(t *testing.T) {
	for _, c := range []struct {
		client, service any
		leftOut         []string
	}{
		{client.Object{}, Volume{}, nil},
		{client.Golden{}, engine.GoldenInfo{}, []string{"warnings"}},
		{client.Details{}, Details{}, []string{"key", "layers", "warnings"}},
		{client.Imported{}, ImportedGolden{}, []string{"source_kind", "not_kept", "passes", "changed", "replaced", "aside",
			"volume", "old_removed"}},
		{client.Pool{}, engine.PoolInfo{}, []string{"why", "backing", "backing_bytes", "clone_cost", "measured_exact",
			"ties", "tied_bytes"}},
		{client.Service{}, Status{}, nil},
		{client.SnapshotGroup{}, SnapshotGroup{}, nil},
		{client.Rewound{}, RewoundVolume{}, nil},
		{client.Destroyed{}, engine.Destroyed{}, nil},
		{client.DestroyReport{}, DestroyReport{}, nil},
		{client.GoldenSet{}, GoldenSet{}, nil},
		{client.Remote{}, RemoteInfo{}, nil},
		{client.Operation{}, Operation{}, nil},
		{client.Progress{}, OperationProgress{}, nil},
		{client.Event{}, engine.HistoryEvent{}, nil},
		{client.Error{}, Problem{}, []string{"type", "title"}},
		{client.CloneRequest{}, CloneRequest{}, nil},
		{client.ForkRequest{}, MakeRequest{}, nil},
		{client.MountRequest{}, MountRequest{}, nil},
		{client.SnapshotRequest{}, SnapshotRequest{}, nil},
		{client.GoldenProperties{}, GoldenSetRequest{}, nil},
		{client.PublishRequest{}, PublishRequest{}, nil},
		{client.PushRequest{}, PushRequest{}, nil},
		{client.PullRequest{}, PullRequest{}, nil},
		{client.VerifyRequest{}, VerifyRequest{}, nil},
		{client.PruneRequest{}, PruneRequest{}, nil},
	} {
		name := reflect.TypeOf(c.client).Name()
		mine, theirs := fieldsOf(reflect.TypeOf(c.client)), fieldsOf(reflect.TypeOf(c.service))
		if len(mine) == 0 || len(theirs) == 0 {
			t.Errorf("%s: no fields", name)
		}
		for field, kind := range theirs {
			have, ok := mine[field]
			switch {
			case !ok && !slices.Contains(c.leftOut, field):
				t.Errorf("client.%s lacks %s", name, field)
			case ok && have != kind && !(slices.Contains(looseKinds, have) && slices.Contains(looseKinds, kind)):
				t.Errorf("client.%s: %s is a %v, not a %v", name, field, have, kind)
			}
		}
		for field := range mine {
			if _, ok := theirs[field]; !ok && !slices.Contains(c.leftOut, field) {
				t.Errorf("client.%s has %s, which the service does not send or take", name, field)
			}
		}
	}

	kinds := map[string]bool{}
	for _, k := range errs.Kinds() {
		kinds[string(k)] = true
	}
	for _, k := range []string{client.Internal, client.Canceled, client.IO} {
		if !kinds[k] {
			t.Errorf("there is no kind %s", k)
		}
	}
}
