// Package service serves a pool over HTTP: programs use it through a unix socket, or through TLS with a token. Its
// handlers only translate between requests and calls of the engine and of package replicate.
//
// A request passes these steps: authenticate finds its caller, authorize decides whether the caller may use the route,
// huma reads and checks its parameters and body, and a handler calls the engine in the name of the caller.
package service

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/front/policy"
	"pando/internal/front/schedule"
	"pando/internal/front/tasks"
	"pando/internal/remote/replicate"

	"github.com/danielgtaylor/huma/v2"
)

// Options are what a service needs besides an engine.
type Options struct {
	Version string
	Drivers engine.Drivers // for fsck, which opens the pool by itself

	// Access says how to reach the stores of remotes.
	Access func() (replicate.Access, error)

	// Tokens are those of callers that come over TCP; nil: there are none.
	Tokens *Tokens

	// Log gets messages that belong to no request, such as problems of maintenance. It must be safe for concurrent use.
	Log func(format string, args ...any)

	// Prepare is called with each server before it begins, to set its ErrorLog. nil: it writes to standard error.
	Prepare func(*http.Server)

	// Tasks is what the service does by itself, besides cleaning up and destroying expired volumes; nil: nothing. Env is
	// the environment of programs that tasks start.
	Tasks *tasks.Config
	Env   []string

	// MetricsVolumes is how many volumes have metrics of their own, those with the most bytes that no other object
	// shares; at most MaxMetricsVolumes.
	MetricsVolumes int

	// Program is the path of this program, which measurements start, and TempDir is where they put what they measure.
	Program string
	TempDir string

	// Grace is how long Serve waits at its end for calls and operations before it cancels them.
	Grace time.Duration
}

// Service is the HTTP API of a pool.
type Service struct {
	Options
	e          *engine.Engine
	api        huma.API
	handler    http.Handler
	document   []byte // OpenAPI
	operations *operations
	schedule   *schedule.Schedule // of tasks
	metrics    *metrics
	running    *runningKeys
	begun      begunWork
	policy     atomic.Pointer[policy.Policy] // nil: only root may use the service
	startedAt  time.Time
	streams    streams // of events
	space      spaceLog
	web        Web // nil: none

	connections, diffs counts[uint32] // of users without root's rights
	strangers          strangers

	// life ends after the grace period of Serve: it is the context of all requests and operations.
	life context.Context
	kill context.CancelFunc

	// closing is closed when Serve begins to end: streams without an end of their own end then.
	closing chan struct{}
	once    sync.Once
}

// New returns a service of an open pool. The caller closes the engine after Serve has returned.
func New(e *engine.Engine, o Options) (*Service, error) {
	s := &Service{Options: o, e: e, running: newRunningKeys(),
		begun: begunWork{byKey: map[string]begunRequest{}}, startedAt: time.Now().UTC(), closing: make(chan struct{})}
	s.life, s.kill = context.WithCancel(context.Background())
	if s.Log == nil {
		s.Log = func(string, ...any) {}
	}
	s.metrics = newMetrics(s)
	s.operations = newOperations(s.life, s.metrics)
	s.schedule = schedule.New()
	s.SetTasks(o.Tasks)

	mux := http.NewServeMux()
	s.api = s.newAPI(mux)
	s.addRoutes()
	document, err := documentOf(s.api)
	if err != nil {
		return nil, err
	}
	s.document = document
	mux.HandleFunc("GET "+documentPath, s.serveDocument)
	s.handler = problemsOf(mux)
	return s, nil
}

// addRoutes adds the routes of all resources.
func (s *Service) addRoutes() {
	s.addServiceRoutes()
	s.addVolumeRoutes()
	s.addVolumeContentRoutes()
	s.addSnapshotRoutes()
	s.addGoldenRoutes()
	s.addLabelRoutes()
	s.addOperationRoutes()
	s.addRequestRoutes()
	s.addTaskRoutes()
	s.addPoolRoutes()
	s.addRemoteRoutes()
	s.addRemotePruneRoutes()
	s.addBenchRoutes()
	s.addStreamRoutes()
	s.addEventRoutes()
	s.addMetricsRoutes()
	s.addWebRoutes()
	s.addSpaceRoutes()
	s.addLineageRoutes()
	s.addActivityRoutes()
}

// Limits of connections, against clients that are slow or send without end.
const (
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
)

// headerTimeout limits how long the header of a request may take to arrive. Tests use less.
var headerTimeout = 10 * time.Second

// Serve answers requests until ctx ends or a listener fails. Then it accepts no more of them, waits for those under way
// and for operations, cancels them after Options.Grace, and returns when all have ended. Tasks it cancels at once: they
// are repeated anyway. It closes the listeners. It returns nil if ctx has ended.
func (s *Service) Serve(ctx context.Context, listeners ...*Listener) error {
	defer s.metrics.pool.close()
	defer s.kill()

	var servers []*http.Server
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		server := s.newServer(l)
		servers = append(servers, server)
		go func() { failed <- server.Serve(l.Listener) }()
	}

	var tasksEnd sync.WaitGroup
	tasksLife, endTasks := context.WithCancel(ctx)
	tasksEnd.Go(func() { s.schedule.Run(tasksLife) })
	tasksEnd.Go(func() { s.space.run(tasksLife, s) })

	// Wait for the end.
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = errs.Wrap("serve", "", err)
	}

	endTasks()
	s.shutDown(servers)
	tasksEnd.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (s *Service) newServer(l *Listener) *http.Server {
	handler := s.authenticate(l, s.handler)
	switch {
	case l.metricsOnly:
		handler = s.metricsOnly(l)
	case l.web:
		handler = s.webOnly()
	}
	server := &http.Server{
		Handler:           s.metrics.observe(handler),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return s.life },
	}
	s.limitConnections(server, l)
	if s.Prepare != nil {
		s.Prepare(server)
	}
	return server
}

// shutDown ends all requests and operations.
func (s *Service) shutDown(servers []*http.Server) {
	s.once.Do(func() { close(s.closing) })
	s.operations.refuse()

	ctx, cancel := context.WithTimeout(context.Background(), s.Grace)
	defer cancel()

	// Let them finish, until the time is over.
	var wg sync.WaitGroup
	for _, server := range servers {
		wg.Go(func() {
			if err := server.Shutdown(ctx); err != nil && !errors.Is(err, http.ErrServerClosed) {
				s.kill()
				s.endNow(server)
			}
		})
	}
	wg.Go(func() {
		if !s.operations.wait(ctx) {
			s.kill()
			s.operations.wait(context.Background())
		}
	})
	wg.Wait()
}

// cleanUpTime is how long requests that were canceled may take to undo what they did.
const cleanUpTime = time.Minute

// endNow waits for requests that were canceled. Those of which nothing is heard lose their connection.
func (s *Service) endNow(server *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTime)
	defer cancel()
	if server.Shutdown(ctx) != nil {
		s.Log("some requests did not end in time")
		_ = server.Close()
	}
}
