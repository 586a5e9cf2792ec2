package rest

import (
	"math"
	"net/http"
	"reflect"
	"strconv"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/service/listing"
	"pando/internal/service/users"
)

// Route is a request that the service answers.
type Route struct {
	Method, Path string
	ID           string // name in the description, and of the operation in errors about the request itself
	Summary      string
	Query        []Parameter
	Body         reflect.Type // type of the JSON value in the request; nil: it has none
	Answer       reflect.Type // type of the JSON value in the answer
	Kind         api.Kind     // kind of the [api.Object] in the answer; "": it contains none
	Status       int          // status of the answer, unless it is an error

	do func(*call) (any, error)
}

// Parameter is a parameter of a route behind the path.
type Parameter struct {
	Name, Description string
	Type              string // string, integer or boolean
	Many              bool   // it may be given several times
}

// parameter returns a parameter of the route, nil if it has none of that name.
func (r Route) parameter(name string) *Parameter {
	for i := range r.Query {
		if r.Query[i].Name == name {
			return &r.Query[i]
		}
	}
	return nil
}

// Routes are all requests that the service answers, but for the description itself.
func Routes() []Route { return routes }

var routes = []Route{
	{
		Method: "GET", Path: "/v1/volumes", ID: "listVolumes", Summary: "List volumes: root sees all, others their own",
		Query: []Parameter{
			{Name: "filter", Type: "string", Many: true,
				Description: "KEY=VALUE, where KEY is a column of `pando ls`, or label=KEY[=VALUE]; all must hold"},
			{Name: "sort", Type: "string", Description: "column, with :desc in descending order (default: name)"},
			{Name: "limit", Type: "integer", Description: "most volumes in the answer (default: all)"},
			{Name: "after", Type: "string", Description: "\"next\" of the page before"},
		},
		Answer: reflect.TypeFor[api.VolumePage](), Status: http.StatusOK, do: listVolumes,
	},
	{
		Method: "POST", Path: "/v1/volumes", ID: "createVolumes", Summary: "Clone a golden, a volume or a snapshot",
		Body: reflect.TypeFor[api.NewVolumes](), Answer: reflect.TypeFor[api.VolumePage](), Status: http.StatusCreated,
		do: createVolumes,
	},
	{
		Method: "GET", Path: "/v1/volumes/{name}", ID: "showVolume", Summary: "Describe a volume",
		Answer: reflect.TypeFor[api.Detail](), Kind: api.KindVolume, Status: http.StatusOK, do: showVolume,
	},
	{
		Method: "DELETE", Path: "/v1/volumes/{name}", ID: "destroyVolume",
		Summary: "Destroy a volume and its snapshots. It is unmounted first, and kept if something uses it",
		Answer:  reflect.TypeFor[engine.Destroyed](), Status: http.StatusOK, do: destroyVolume,
	},
	{
		Method: "PUT", Path: "/v1/volumes/{name}/mount", ID: "mountVolume",
		Summary: "Mount a volume. For users other than root its files belong to them, and it is nosuid and nodev",
		Body:    reflect.TypeFor[api.NewMount](), Answer: reflect.TypeFor[api.Object](), Kind: api.KindVolume,
		Status: http.StatusOK, do: mountVolume,
	},
	{
		Method: "DELETE", Path: "/v1/volumes/{name}/mount", ID: "umountVolume",
		Summary: "Unmount a volume, unless something uses it",
		Query: []Parameter{
			{Name: "discard", Type: "boolean", Description: "give up data that could not be stored (default: false)"},
		},
		Answer: reflect.TypeFor[api.Object](), Kind: api.KindVolume, Status: http.StatusOK, do: umountVolume,
	},
	{
		Method: "GET", Path: "/v1/goldens", ID: "listGoldens", Summary: "List the goldens that may be cloned",
		Answer: reflect.TypeFor[api.GoldenPage](), Status: http.StatusOK, do: listGoldens,
	},
	{
		Method: "GET", Path: "/v1/goldens/{name}", ID: "showGolden", Summary: "Describe a golden with its generations",
		Answer: reflect.TypeFor[api.Golden](), Status: http.StatusOK, do: showGolden,
	},
	{
		Method: "GET", Path: "/v1/pool", ID: "showPool", Summary: "Describe the pool, for root",
		Answer: reflect.TypeFor[api.Pool](), Status: http.StatusOK, do: showPool,
	},
}

func listVolumes(c *call) (any, error) {
	v := c.query
	q := listing.Request{Filters: v["filter"], Sort: v.Get("sort"), After: v.Get("after")}
	if text := v.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, errs.New(errs.Invalid, "ls", text, "the limit must be a number")
		}
		q.Limit = n
	}
	p, err := c.users.Volumes(c.Context(), q)
	return api.VolumePage{Volumes: orEmpty(p.Volumes), Next: p.Next}, err
}

func createVolumes(c *call) (any, error) {
	var in api.NewVolumes
	if err := c.decode("clone", &in); err != nil {
		return nil, err
	}
	q := users.CloneRequest{Count: in.Count, SizeBytes: in.SizeBytes, Ephemeral: in.Ephemeral, Overlay: in.Overlay,
		Mount: in.Mount, Dir: in.Dir}

	var err error
	if q.From, err = ref.Parse("clone", in.From); err != nil {
		return nil, err
	}
	if q.Name, err = ref.ParseName("clone", in.Name); err != nil {
		return nil, err
	}
	if q.Labels, err = driver.NewLabels("clone", in.Labels); err != nil {
		return nil, err
	}
	if in.TTLSeconds < 0 || in.TTLSeconds > math.MaxInt64/int64(time.Second) {
		return nil, errs.New(errs.Invalid, "clone", in.Name, "a volume cannot stay for %d s", in.TTLSeconds)
	}

	q.TTL = time.Duration(in.TTLSeconds) * time.Second
	if in.Dir != "" && !in.Mount {
		return nil, errs.New(errs.Invalid, "clone", in.Name, "a directory is given, but the volume is not to be mounted").
			WithHint("set %s, or leave %s out", errs.Param("mount"), errs.Param("dir"))
	}
	made, err := c.users.Clone(c.Context(), q)
	return api.VolumePage{Volumes: orEmpty(made)}, err
}

func showVolume(c *call) (any, error) {
	name, err := c.name("show")
	if err != nil {
		return nil, err
	}
	return c.users.Volume(c.Context(), name)
}

func destroyVolume(c *call) (any, error) {
	name, err := c.name("destroy")
	if err != nil {
		return nil, err
	}
	return c.users.Destroy(c.Context(), name)
}

func mountVolume(c *call) (any, error) {
	name, err := c.name("mount")
	if err != nil {
		return nil, err
	}
	var in api.NewMount
	if len(c.body) > 0 {
		if err := c.decode("mount", &in); err != nil {
			return nil, err
		}
	}
	return c.users.Mount(c.Context(), name, in.Dir)
}

func umountVolume(c *call) (any, error) {
	name, err := c.name("umount")
	if err != nil {
		return nil, err
	}
	discard := false
	if text := c.query.Get("discard"); text != "" {
		if discard, err = strconv.ParseBool(text); err != nil {
			return nil, errs.New(errs.Invalid, "umount", text, "it must be true or false")
		}
	}
	return c.users.Umount(c.Context(), name, discard)
}

func listGoldens(c *call) (any, error) {
	all, err := c.users.Goldens(c.Context())
	return api.GoldenPage{Goldens: orEmpty(all)}, err
}

func showGolden(c *call) (any, error) {
	name, err := c.name("show")
	if err != nil {
		return nil, err
	}
	return c.users.Golden(c.Context(), name)
}

func showPool(c *call) (any, error) { return c.users.Pool(c.Context()) }

// name is the name in the path of a request. Invalid.
func (c *call) name(op string) (ref.Name, error) { return ref.ParseName(op, c.PathValue("name")) }

// orEmpty makes a list that is never null in JSON.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}
