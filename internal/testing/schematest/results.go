// Package schematest knows the JSON that each command prints: it makes the published schema from the types that are
// printed, and holds what commands print to it.
package schematest

import (
	"reflect"
	"strings"

	"pando/internal/api"
	"pando/internal/bench"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/observe/diagnose"
	"pando/internal/observe/doctor"
	"pando/internal/observe/iostat"
	"pando/internal/observe/syncbench"
	"pando/internal/remote/replicate"
	"pando/internal/source/git"
)

// shape is a form that a value of JSON can have.
type shape struct {
	of   reflect.Type
	kind api.Kind // kind of the [api.Object] that the type contains, or several with commas; "": it contains none
	list bool     // an array of them
}

// a is the shape of a type that contains no object, or a list of such.
func a[T any]() shape {
	t := reflect.TypeFor[T]()
	if t.Kind() == reflect.Slice {
		return shape{of: t.Elem(), list: true}
	}
	return shape{of: t}
}

// the is the shape of a type that contains an object of a kind, or a list of such.
func the[T any](kind api.Kind) shape {
	s := a[T]()
	s.kind = kind
	return s
}

// any3 are the shapes of a type that contains an object of any kind.
func any3[T any]() []shape {
	return []shape{the[T](api.KindVolume), the[T](api.KindSnapshot), the[T](api.KindGeneration)}
}

// mixed is the shape of a list of objects of several kinds.
func mixed(kinds ...string) shape { return the[[]api.Object](api.Kind(strings.Join(kinds, ","))) }

// things are what commands speak of, by their names in the schema.
var things = map[string]shape{
	"volume":        the[api.Detail](api.KindVolume),
	"snapshot":      the[api.Detail](api.KindSnapshot),
	"generation":    the[api.Detail](api.KindGeneration),
	"golden":        a[api.Golden](),
	"pool":          a[api.Pool](),
	"event":         a[api.Event](),
	"remote":        a[api.Remote](),
	"remote_volume": a[api.RemoteVolume](),
	"point":         a[api.Point](),
	"operation":     a[api.Operation](),
	"error":         a[api.Error](),
}

// results are what commands print with --json if they succeed. With --every and --follow, and for each interval, it is
// one value a line.
var results = map[string][]shape{
	"clone":    {the[api.Object](api.KindVolume), the[[]api.Object](api.KindVolume)},
	"fork":     {the[api.Object](api.KindVolume), the[[]api.Object](api.KindVolume)},
	"mount":    {the[api.Object](api.KindVolume), the[[]api.Object](api.KindVolume)},
	"umount":   {the[api.Object](api.KindVolume), the[[]api.Object](api.KindVolume)},
	"ls":       {mixed("volume", "snapshot")},
	"show":     append(any3[api.Detail](), a[api.Golden](), a[api.Pool]()),
	"diff":     {a[engine.Difference]()},
	"rebase":   {the[engine.Rebased](api.KindVolume), a[engine.Conflicts]()},
	"flatten":  {the[engine.Flatten](api.KindVolume)},
	"destroy":  {a[[]engine.Destroyed]()},
	"snapshot": {the[api.Object](api.KindSnapshot), the[[]api.Object](api.KindSnapshot)},
	"rewind":   {the[engine.Rewound](api.KindVolume)},
	"resize":   {the[engine.Resized](api.KindVolume)},
	"rename": {the[engine.Renamed](api.KindVolume), the[engine.Renamed](api.KindSnapshot),
		a[api.GoldenRenamed]()},
	"export":    {a[engine.Exported]()},
	"pin":       append(any3[api.Object](), mixed("volume", "snapshot", "generation")),
	"unpin":     append(any3[api.Object](), mixed("volume", "snapshot", "generation")),
	"set":       {the[api.Object](api.KindVolume), the[[]api.Object](api.KindVolume)},
	"label ls":  {a[api.Labelled]()},
	"label set": {a[api.Labelled]()},
	"label rm":  {a[api.Labelled]()},

	"golden import":  {the[engine.Imported](api.KindGeneration), the[git.Made](api.KindGeneration)},
	"golden refresh": {the[git.Made](api.KindGeneration)},
	"golden publish": {the[engine.Published](api.KindGeneration)},
	"golden ls":      {a[[]api.Golden]()},
	"golden show":    {a[api.Golden](), the[api.Detail](api.KindGeneration)},
	"golden set":     {a[api.GoldenSet]()},
	"golden keep":    {a[api.GoldenSet]()},
	"golden rm":      {a[[]engine.Destroyed]()},

	"push": {a[[]replicate.Pushed](), a[replicate.Pushed]()},
	"pull": {the[replicate.Pulled](api.KindVolume), the[replicate.Pulled](api.KindGeneration),
		the[[]replicate.Pulled]("volume,generation")},
	"verify":            {a[replicate.Verified]()},
	"remote add":        {a[replicate.Added]()},
	"remote ls":         {a[[]api.Remote](), a[[]api.RemoteVolume](), a[api.RemoteVolume]()},
	"remote rm":         {a[replicate.Forgotten]()},
	"remote delete":     {a[replicate.Removed]()},
	"remote prune":      {a[replicate.Pruned]()},
	"remote repair":     {a[replicate.Repaired]()},
	"remote writer":     {a[replicate.WriterIdentity]()},
	"remote key ls":     {a[[]replicate.Key]()},
	"remote key add":    {a[replicate.Key]()},
	"remote key rm":     {a[replicate.Key]()},
	"remote key rotate": {a[[]replicate.Key]()},
	"remote key export": {a[replicate.ExportedKit]()},

	"init":        {a[engine.InitReport](), a[check.Rebuilt]()},
	"deinit":      {a[engine.DeinitReport]()},
	"pool resize": {a[engine.PoolResized]()},
	"gc":          {a[engine.GCReport]()},
	"prune":       {a[engine.PruneReport]()},
	"fsck":        {a[check.Report]()},
	"history":     {a[[]api.Event](), a[api.Event]()},
	"version":     {a[api.Version]()},
}

// measurements are what commands that measure print: their pages in docs/ describe them.
var measurements = map[string][]shape{
	"doctor":          {a[doctor.Examination](), a[doctor.Report](), a[[]doctor.Check]()},
	"diagnose":        {a[diagnose.Report]()},
	"iostat":          {a[iostat.Sample](), a[iostat.Outcome]()},
	"bench clone":     {a[bench.Report](), a[bench.Cleaned]()},
	"bench density":   {a[bench.DensityReport]()},
	"bench reclaim":   {a[bench.ReclaimReport]()},
	"bench replicate": {a[bench.ReplicateReport]()},
	"bench sync":      {a[syncbench.Report](), a[[]syncbench.Profile]()},
	"bench report":    {a[syncbench.Report]()},
	"bench compare":   {a[syncbench.Comparison]()},
}
