package service

import (
	"context"
	"net/http"
	"runtime"
	"time"

	"pando/internal/base/errs"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	metricsPath  = "/metrics"
	metricsRoute = "read-metrics"
)

// maxScrapes limits how many scrapes are answered at a time. Others get 503.
const maxScrapes = 8

// metrics are what GET /metrics answers with: counts of what this process does, and a collector that reads the pool
// when somebody asks. Labels have values that the program chooses, and names of goldens and remotes; those of volumes
// only on request, and of a limited number.
type metrics struct {
	handler http.Handler
	pool    *poolCollector

	requests   *prometheus.CounterVec
	durations  *prometheus.HistogramVec // of requests
	inFlight   prometheus.Gauge
	errors     *prometheus.CounterVec
	running    *prometheus.GaugeVec
	operations *prometheus.HistogramVec
}

// Upper bounds of histograms, in seconds: of requests, which are answered at once, and of operations.
var (
	requestBounds   = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60}
	operationBounds = []float64{.1, .5, 1, 5, 15, 60, 300, 1800, 7200, 43200}
)

func newMetrics(s *Service) *metrics {
	m := &metrics{
		pool: newPoolCollector(s),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "pando_http_requests_total",
			Help: "Requests that were answered, by route of the API and HTTP status."}, []string{"route", "status"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "pando_http_request_duration_seconds",
			Help: "Time from the header of a request to the end of its answer.", Buckets: requestBounds}, []string{"route"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "pando_http_requests_in_flight",
			Help: "Requests that are being answered, including streams of events."}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "pando_errors_total",
			Help: "Errors that requests and operations ended with, by kind."}, []string{"source", "kind"}),
		running: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "pando_operations_running",
			Help: "Operations of the service that are running."}, []string{"verb"}),
		operations: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "pando_operation_duration_seconds",
			Help:    "Time that operations of the service took, by verb and by how they ended: done, failed, canceled.",
			Buckets: operationBounds}, []string{"verb", "state"}),
	}

	// All kinds exist from the start, so that the first error is an increase.
	for _, kind := range errs.Kinds() {
		m.errors.WithLabelValues(sourceRequest, string(kind))
		m.errors.WithLabelValues(sourceOperation, string(kind))
	}

	registry := prometheus.NewRegistry()
	registry.MustRegister(m.pool, m.requests, m.durations, m.inFlight, m.errors, m.running, m.operations,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "pando_event_streams",
			Help: "Streams of events that are open."}, func() float64 { return float64(s.streams.count()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "pando_build_info", Help: "Version of the program; always 1.",
			ConstLabels: prometheus.Labels{"version": s.Version, "goversion": runtime.Version()}},
			func() float64 { return 1 }),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.handler = promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog: scrapeLog{s}, ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: maxScrapes})
	return m
}

// Sources of errors.
const (
	sourceRequest   = "request"
	sourceOperation = "operation"
)

// scrapeLog passes on what promhttp complains about.
type scrapeLog struct{ s *Service }

// Println logs a problem.
func (l scrapeLog) Println(v ...any) { l.s.Log("metrics: %v", v) }

// began notes the beginning of an operation.
func (m *metrics) began(verb string) { m.running.WithLabelValues(verb).Inc() }

// ended notes the end of an operation.
func (m *metrics) ended(op Operation) {
	m.running.WithLabelValues(op.Verb).Dec()
	m.operations.WithLabelValues(op.Verb, op.State).Observe(op.FinishedAt.Sub(op.StartedAt).Seconds())
	if op.Error != nil {
		m.errors.WithLabelValues(sourceOperation, op.Error.Kind).Inc()
	}
}

func (s *Service) addMetricsRoutes() {
	add(s, route{id: metricsRoute, access: rootOnly, method: "GET", path: metricsPath, tag: "service",
		summary: "Read metrics of the pool and the service, for Prometheus",
		answer: &huma.Response{Description: "Metrics in the text format of Prometheus",
			Content: map[string]*huma.MediaType{"text/plain": {Schema: &huma.Schema{Type: "string"}}}}},
		func(context.Context, *struct{}) (*huma.StreamResponse, error) {
			return &huma.StreamResponse{Body: func(hc huma.Context) {
				r, w := humago.Unwrap(hc)
				s.metrics.handler.ServeHTTP(w, r)
			}}, nil
		})
}

// metricsOnly serves metrics, and nothing else, to everybody who can connect to a listener of ListenMetrics.
func (s *Service) metricsOnly(l *Listener) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w = &deadlineWriter{ResponseWriter: w}
		switch {
		case !l.isHost(r.Host):
			sendProblem(w, r, wrongHost(r.Host))
		case r.URL.Path != metricsPath:
			sendProblem(w, r, problemOf(errs.New(errs.NotFound, r.Method, r.URL.Path, "this address has metrics only").
				WithHint("GET %s", metricsPath)))
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			p := problemOf(errs.New(errs.Unsupported, r.Method, r.URL.Path, "this path has no such method").
				WithHint("use GET"))
			sendProblem(w, r, p.withStatus(http.StatusMethodNotAllowed))
		default:
			setRoute(r.Context(), metricsRoute)
			s.metrics.handler.ServeHTTP(w, r)
		}
	})
}

// observe measures requests to a handler.
func (m *metrics) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.inFlight.Inc()
		defer m.inFlight.Dec()

		begun, name := time.Now(), "none"
		seen := &observedWriter{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(seen, r.WithContext(context.WithValue(r.Context(), routeKey{}, &name)))

		m.requests.WithLabelValues(name, statusLabel(seen.status)).Inc()
		m.durations.WithLabelValues(name).Observe(time.Since(begun).Seconds())
		if seen.kind != "" {
			m.errors.WithLabelValues(sourceRequest, string(seen.kind)).Inc()
		}
	})
}

type routeKey struct{}

// setRoute notes which route a request has. Those that have none, or are refused before it is known, count as none.
func setRoute(ctx context.Context, id string) {
	if name, ok := ctx.Value(routeKey{}).(*string); ok {
		*name = id
	}
}
