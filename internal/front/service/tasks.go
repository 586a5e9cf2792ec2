package service

import (
	"context"
	"time"

	"pando/internal/base/progress"
	"pando/internal/base/warnings"
	"pando/internal/front/tasks"
)

// Task is what the service does by itself.
type Task struct {
	Name           string     `json:"name"`
	Verb           string     `json:"verb" doc:"What it does: snapshot, push"`
	Ref            string     `json:"ref" doc:"What it works on; may be empty"`
	EverySeconds   float64    `json:"every_seconds" doc:"0: when there is something to do"`
	Running        bool       `json:"running"`
	Runs           int        `json:"runs" doc:"That have ended since the service started"`
	LastStartedAt  *time.Time `json:"last_started_at"`
	LastFinishedAt *time.Time `json:"last_finished_at"`
	LastResult     string     `json:"last_result" doc:"Of the last run that did not fail"`
	LastError      *Problem   `json:"last_error,omitempty" doc:"Of the last run, if it failed"`
	Failures       int        `json:"failures" doc:"Runs that have failed in a row"`
	NextAt         *time.Time `json:"next_at" doc:"When it is due; null: unknown"`
}

// TaskList lists tasks.
type TaskList struct {
	Items []Task `json:"items" nullable:"false"`
}

func (s *Service) addTaskRoutes() {
	add(s, route{id: "list-tasks", access: rootOnly, method: "GET", path: "/v1/tasks", tag: "service",
		summary: "List what the service does by itself, and what came of it",
		about: "Tasks are set in a file on the host. Runs that take longer are operations while they run, begun by \"task " +
			"NAME\"."},
		func(context.Context, *struct{}) (*struct{ Body TaskList }, error) {
			return &struct{ Body TaskList }{TaskList{s.describeTasks()}}, nil
		})
}

// describeTasks describes all tasks as they are now.
func (s *Service) describeTasks() []Task {
	moment := func(t time.Time) *time.Time {
		if t.IsZero() {
			return nil
		}
		t = t.UTC()
		return &t
	}

	out := []Task{}
	for _, st := range s.schedule.States() {
		t := Task{Name: st.Name, Verb: st.Verb, Ref: st.Ref, EverySeconds: st.Every.Seconds(), Running: st.Running,
			Runs: st.Runs, LastStartedAt: moment(st.LastStart), LastFinishedAt: moment(st.LastEnd), LastResult: st.Result,
			Failures: st.Failed, NextAt: moment(st.Next)}
		if st.Err != nil {
			t.LastError = problemOf(st.Err)
		}
		out = append(out, t)
	}
	return out
}

// SetTasks sets what the service does by itself, also while it runs. nil: nothing but cleaning up and destroying
// expired volumes. A task that is running ends before its successor begins.
func (s *Service) SetTasks(c *tasks.Config) {
	if c == nil {
		c = &tasks.Config{}
	}
	h := &tasks.Host{Engine: s.e, Env: s.Env, Remote: s.remote, Log: s.Log, Begin: s.beginTask}
	s.schedule.Replace(h.Jobs(c))
}

// beginTask begins an operation of a task. It ends with ctx, or when somebody cancels it.
func (s *Service) beginTask(
	ctx context.Context, verb, ref, task string,
) (context.Context, *progress.Tracker, func(result any, err error), error) {
	ctx, cancel := context.WithCancel(ctx)
	w, err := s.operations.begin(verb, ref, Caller{task: task}, cancel)
	if err != nil {
		cancel()
		return nil, nil, nil, err
	}

	return warnings.Collect(ctx, w.warnings), w.tracker, func(result any, err error) {
		w.finish(httpWords{}, result, err)
		s.operations.running.Done()
		cancel()
	}, nil
}
