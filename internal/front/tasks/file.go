// Package tasks is what a service does by itself: it destroys volumes when they expire, keeps space free, and takes
// snapshots, pushes, pulls and refreshes as a file says. Package schedule says when.
package tasks

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/quantity"
	"pando/internal/base/ref"
	"pando/internal/base/tomlfile"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/front/schedule"
	"pando/internal/remote/replicate"
)

const opRead = "read tasks"

// DefaultFile is where the tasks of a service are.
const DefaultFile = "/etc/pando/tasks.toml"

// Config is what a file of tasks says. The zero value is that of a service without one.
type Config struct {
	KeepFree float64       // percent of the pool; 0: nothing is pruned
	GC       time.Duration // 0: never
	Tasks    []Task
}

// Task is a task of the file. One of the fields from Snapshot on says what it does.
type Task struct {
	Name  string
	Every time.Duration

	Snapshot string           // pattern of names of volumes
	Group    bool             // its snapshots are of one point in time
	Before   string           // shell command before its snapshots
	After    string           // and after them
	Keep     replicate.Policy // of its snapshots, or the points of PruneRemote
	Push     []ref.Pattern
	Pull     ref.Ref
	As       ref.Name // of what is pulled
	Remote   string   // of Push and Pull
	Limit    int64    // bytes a second; 0: none
	Refresh  ref.Name // golden
	Prune    engine.PruneRequest

	Verify      string  // remote
	ReadPercent float64 // of its data
	PruneRemote string  // remote
}

// Names of jobs that need no task in the file.
const (
	nameExpire   = "expire"
	nameMaintain = "maintenance"
	nameKeepFree = "keep_free"
	nameGC       = "gc"
)

// file is the form of a file: see docs/tasks.md.
type file struct {
	KeepFree string      `toml:"keep_free"`
	GC       string      `toml:"gc"`
	Tasks    []tableTask `toml:"task"`
}

type tableTask struct {
	Name        string      `toml:"name"`
	Every       string      `toml:"every"`
	Snapshot    string      `toml:"snapshot"`
	KeepLast    int         `toml:"keep_last"`
	KeepHourly  int         `toml:"keep_hourly"`
	KeepDaily   int         `toml:"keep_daily"`
	KeepWeekly  int         `toml:"keep_weekly"`
	KeepMonthly int         `toml:"keep_monthly"`
	KeepYearly  int         `toml:"keep_yearly"`
	KeepWithin  string      `toml:"keep_within"`
	Push        []string    `toml:"push"`
	Pull        string      `toml:"pull"`
	As          string      `toml:"as"`
	Remote      string      `toml:"remote"`
	LimitRate   string      `toml:"limit_rate"`
	Refresh     string      `toml:"refresh"`
	Prune       *tablePrune `toml:"prune"`
	Group       bool        `toml:"group"`
	Before      string      `toml:"before"`
	After       string      `toml:"after"`
	Verify      string      `toml:"verify"`
	ReadData    string      `toml:"read_data"`
	RemotePrune string      `toml:"remote_prune"`
}

type tablePrune struct {
	KeepFree  *string  `toml:"keep_free"`
	OlderThan *string  `toml:"older_than"`
	Idle      *string  `toml:"idle"`
	Labels    []string `toml:"labels"`
}

// keys is the hint for a key that does not exist.
const keys = "keys are keep_free and gc, and of a [[task]]: name, every, snapshot, group, before, after, keep_last, " +
	"keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly, keep_within, push, pull, as, remote, limit_rate, " +
	"verify, read_data, remote_prune, refresh and prune, and of prune: keep_free, older_than, idle and labels"

// ReadFile reads a file of tasks. If there are commands in it, others must not be able to change it. NotFound,
// Permission, Invalid (with the line).
func ReadFile(name string) (*Config, error) {
	text, err := tomlfile.Read(opRead, "a file of tasks", name)
	if err != nil {
		return nil, err
	}
	c, err := parse(name, text)
	if err == nil && slices.ContainsFunc(c.Tasks, func(t Task) bool { return t.Before+t.After != "" }) {
		err = tomlfile.CheckOwned(opRead, name)
	}
	return c, err
}

// reader reads a file that has been decoded, and knows where its keys are.
type reader struct {
	name  string
	lines tomlfile.Lines
}

// parse reads the text of a file. Invalid.
func parse(name string, text []byte) (*Config, error) {
	var f file
	if err := tomlfile.Decode(opRead, name, text, &f, keys); err != nil {
		return nil, err
	}

	r := reader{name, tomlfile.LinesOf(text)}
	c := &Config{}
	var err error
	if r.has("keep_free") {
		if c.KeepFree, err = r.percent("keep_free", f.KeepFree); err != nil {
			return nil, err
		}
	}
	if r.has("gc") {
		if c.GC, err = r.period("gc", f.GC); err != nil {
			return nil, err
		}
	}

	known := []string{nameExpire, nameMaintain, nameKeepFree, nameGC}
	for i, t := range f.Tasks {
		at := fmt.Sprintf("task.%d", i)
		task, err := r.task(at, t)
		if err != nil {
			return nil, err
		}
		if slices.Contains(known, task.Name) {
			return nil, r.bad(at, "there is another task %q", task.Name).
				WithHint("give the task another name: name = \"...\"")
		}
		known = append(known, task.Name)
		c.Tasks = append(c.Tasks, task)
	}
	return c, nil
}

// has reports whether the file has a key.
func (r reader) has(key string) bool { return r.lines[key] > 0 }

// bad returns an error about a key, or a table without it.
func (r reader) bad(key, format string, args ...any) *errs.Error {
	line := r.lines[key]
	for line == 0 && key != "" {
		key = key[:max(strings.LastIndexByte(key, '.'), 0)]
		line = r.lines[key]
	}
	return errs.New(errs.Invalid, opRead, r.name, "line %d: %s", line, fmt.Sprintf(format, args...))
}

// wrap returns the error about the value of a key, with its line.
func (r reader) wrap(key string, err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	var e *errs.Error
	if errors.As(err, &e) && e.Err != nil {
		if text = e.Err.Error(); e.Ref != "" {
			text = e.Ref + ": " + text
		}
	}
	return r.bad(key, "%s: %s", key[strings.LastIndexByte(key, '.')+1:], text).WithHint("%s", errs.HintIn(err))
}

func (r reader) percent(key, text string) (float64, error) {
	p, err := quantity.ParsePercent(opRead, text)
	if err == nil && p == 0 {
		err = errs.New(errs.Invalid, opRead, text, "must be greater than 0 %%").WithHint("use for example \"10%%\"")
	}
	return p, r.wrap(key, err)
}

func (r reader) duration(key, text string) (time.Duration, error) {
	d, err := quantity.ParseDuration(opRead, text)
	return d, r.wrap(key, err)
}

// period reads an interval.
func (r reader) period(key, text string) (time.Duration, error) {
	d, err := r.duration(key, text)
	if err == nil && d < time.Second {
		return 0, r.bad(key, "an interval must be at least 1s (got %s)", text).WithHint("use for example \"15m\"")
	}
	return d, err
}

// kinds are the keys that say what a task does.
var kinds = []string{"snapshot", "push", "pull", "refresh", "prune", "verify", "remote_prune"}

// belongs has the keys that only tasks of some kinds may have.
var belongs = map[string][]string{
	"keep_last": retained, "keep_hourly": retained, "keep_daily": retained, "keep_weekly": retained,
	"keep_monthly": retained, "keep_yearly": retained, "keep_within": retained,
	"group": {"snapshot"}, "before": {"snapshot"}, "after": {"snapshot"}, "read_data": {"verify"},
	"remote": {"push", "pull"}, "limit_rate": {"push", "pull"}, "as": {"pull"},
}

// retained are the kinds that remove what their rules do not keep.
var retained = []string{"snapshot", "remote_prune"}

// task reads a task.
func (r reader) task(at string, in tableTask) (t Task, err error) {
	kind, err := r.kind(at, in)
	if err != nil {
		return t, err
	}
	if !r.has(at + ".every") {
		return t, r.bad(at, "the task has no interval").WithHint("add for example every = \"15m\"")
	}
	if t.Every, err = r.period(at+".every", in.Every); err != nil {
		return t, err
	}

	switch kind {
	case "snapshot":
		err = r.snapshot(at, in, &t)
	case "push":
		err = r.push(at, in, &t)
	case "pull":
		err = r.pull(at, in, &t)
	case "refresh":
		t.Refresh, err = ref.ParseName(opRead, in.Refresh)
		err = r.wrap(at+".refresh", err)
	case "prune":
		t.Prune, err = r.prune(at+".prune", in.Prune)
	case "verify":
		err = r.verify(at, in, &t)
	case "remote_prune":
		t.PruneRemote = in.RemotePrune
		if err = r.wrap(at+".remote_prune", ref.CheckName(opRead, in.RemotePrune)); err == nil {
			err = r.retention(at, in, &t.Keep)
		}
	}
	if err != nil {
		return t, err
	}
	return t, r.nameTask(at, in, &t)
}

// kind returns what a task does, and refuses keys that it cannot have.
func (r reader) kind(at string, in tableTask) (string, error) {
	kind := ""
	for _, k := range kinds {
		switch {
		case !r.has(at+"."+k) && (k != "prune" || in.Prune == nil):
		case kind != "":
			return "", r.bad(at+"."+k, "a task cannot have both %s and %s", kind, k).
				WithHint("begin another [[task]] for one of them")
		default:
			kind = k
		}
	}
	if kind == "" {
		return "", r.bad(at, "the task does not say what to do").
			WithHint("add one of the keys %s", strings.Join(kinds, ", "))
	}

	for key, of := range belongs {
		if r.has(at+"."+key) && !slices.Contains(of, kind) {
			return "", r.bad(at+"."+key, "a task with %s cannot have %s", kind, key).
				WithHint("remove %s: it belongs to %s", key, strings.Join(of, " and "))
		}
	}
	return kind, nil
}

// nameMost limits the names of tasks, which are values of labels.
const nameMost = 100

// nameTask gives a task its name: that of the file, or one that says what it does.
func (r reader) nameTask(at string, in tableTask, t *Task) error {
	if r.has(at + ".name") {
		if t.Name = in.Name; ref.CheckName(opRead, in.Name) != nil {
			return r.bad(at+".name", "%q cannot be a name", in.Name).WithHint("use letters, digits, . _ and -")
		}
		return nil
	}
	if t.Name = strings.TrimSpace(t.Verb() + " " + t.What()); len(t.Name) > nameMost {
		return r.bad(at, "the task needs a name").WithHint("add for example name = \"nightly\"")
	}
	return nil
}

// Verb is what the task does, as on the command line.
func (t Task) Verb() string {
	switch {
	case t.Snapshot != "":
		return "snapshot"
	case len(t.Push) > 0:
		return "push"
	case t.Pull.Name != "":
		return "pull"
	case !t.Refresh.IsZero():
		return "refresh"
	case t.Verify != "":
		return "verify"
	case t.PruneRemote != "":
		return "remote prune"
	}
	return "prune"
}

// What is what the task works on.
func (t Task) What() string {
	switch t.Verb() {
	case "snapshot":
		if t.Group {
			return t.Snapshot + " at once"
		}
		return t.Snapshot
	case "verify":
		return t.Verify
	case "remote prune":
		return t.PruneRemote
	case "push":
		var all []string
		for _, p := range t.Push {
			all = append(all, p.String())
		}
		return strings.Join(all, " ") + " to " + t.Remote
	case "pull":
		return t.Pull.String() + " from " + t.Remote
	case "refresh":
		return t.Refresh.String()
	}
	return selection(t.Prune)
}

// selection says what a prune removes.
func selection(q engine.PruneRequest) string {
	var all []string
	if q.Idle > 0 {
		all = append(all, "idle "+schedule.FormatInterval(q.Idle))
	}
	if q.OlderThan > 0 {
		all = append(all, "older than "+schedule.FormatInterval(q.OlderThan))
	}
	if !q.Labels.IsZero() {
		all = append(all, "with "+q.Labels.String())
	}
	if q.KeepFreePercent > 0 {
		all = append(all, "until "+percent(q.KeepFreePercent)+" is free")
	}
	return strings.Join(all, ", ")
}

func (r reader) snapshot(at string, in tableTask, t *Task) error {
	t.Snapshot = in.Snapshot
	if p, err := ref.ParsePattern(opRead, in.Snapshot); err != nil {
		return r.wrap(at+".snapshot", err)
	} else if p.Ref.At != "" {
		return r.bad(at+".snapshot", "%q is not a volume", in.Snapshot).WithHint("name a volume, or use a pattern: \"db-*\"")
	}
	t.Group, t.Before, t.After = in.Group, in.Before, in.After
	return r.retention(at, in, &t.Keep)
}

// verify reads which remote is checked, and how much of it.
func (r reader) verify(at string, in tableTask, t *Task) error {
	t.Verify = in.Verify
	err := r.wrap(at+".verify", ref.CheckName(opRead, in.Verify))
	switch {
	case err != nil || !r.has(at+".read_data"):
		return err
	case in.ReadData == "100%":
		t.ReadPercent = 100
		return nil
	}
	t.ReadPercent, err = r.percent(at+".read_data", in.ReadData)
	return err
}

// retention reads what is kept.
func (r reader) retention(at string, in tableTask, k *replicate.Policy) error {
	for _, n := range []struct {
		key  string
		text int
		to   *int
	}{{"keep_last", in.KeepLast, &k.Last}, {"keep_hourly", in.KeepHourly, &k.Hourly}, {"keep_daily", in.KeepDaily,
		&k.Daily}, {"keep_weekly", in.KeepWeekly, &k.Weekly}, {"keep_monthly", in.KeepMonthly, &k.Monthly},
		{"keep_yearly", in.KeepYearly, &k.Yearly}} {
		if r.has(at+"."+n.key) && n.text < 1 {
			return r.bad(at+"."+n.key, "%s must be at least 1 (got %d)", n.key, n.text).
				WithHint("remove the key, or use a number of at least 1")
		}
		*n.to = n.text
	}
	if r.has(at + ".keep_within") {
		var err error
		k.Within, err = r.duration(at+".keep_within", in.KeepWithin)
		return err
	}
	return nil
}

// remote reads what push and pull have in common.
func (r reader) remote(at string, in tableTask, t *Task) error {
	if !r.has(at + ".remote") {
		return r.bad(at, "the task has no remote").WithHint("add for example remote = \"backup\"")
	}
	if err := ref.CheckName(opRead, in.Remote); err != nil {
		return r.wrap(at+".remote", err)
	}
	t.Remote = in.Remote
	if r.has(at + ".limit_rate") {
		n, err := quantity.ParseSize(opRead, strings.TrimSuffix(in.LimitRate, "/s"))
		t.Limit = n
		return r.wrap(at+".limit_rate", err)
	}
	return nil
}

func (r reader) push(at string, in tableTask, t *Task) (err error) {
	if len(in.Push) == 0 {
		return r.bad(at+".push", "nothing to push").WithHint("name volumes or goldens: push = [\"db-*\", \"web\"]")
	}
	if t.Push, err = ref.ParsePatterns(opRead, in.Push...); err != nil {
		return r.wrap(at+".push", err)
	}
	return r.remote(at, in, t)
}

func (r reader) pull(at string, in tableTask, t *Task) (err error) {
	if t.Pull, err = ref.Parse(opRead, in.Pull); err != nil {
		return r.wrap(at+".pull", err)
	}
	if r.has(at + ".as") {
		if t.As, err = ref.ParseName(opRead, in.As); err != nil {
			return r.wrap(at+".as", err)
		}
	}
	return r.remote(at, in, t)
}

func (r reader) prune(at string, in *tablePrune) (q engine.PruneRequest, err error) {
	if in.KeepFree != nil {
		if q.KeepFreePercent, err = r.percent(at+".keep_free", *in.KeepFree); err != nil {
			return q, err
		}
	}
	if in.OlderThan != nil {
		if q.OlderThan, err = r.duration(at+".older_than", *in.OlderThan); err != nil {
			return q, err
		}
	}
	if in.Idle != nil {
		if q.Idle, err = r.duration(at+".idle", *in.Idle); err != nil {
			return q, err
		}
	}

	if q.Labels, err = driver.ParseLabelSelector(opRead, in.Labels...); err != nil {
		return q, r.wrap(at+".labels", err)
	}
	if q.KeepFreePercent == 0 && q.OlderThan == 0 && q.Idle == 0 {
		return q, r.bad(at, "prune does not say what to remove").
			WithHint("add keep_free, older_than or idle: prune = { idle = \"7d\" }")
	}
	return q, nil
}
