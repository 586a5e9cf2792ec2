package objstore

import (
	"net/http"
	"net/url"
)

// Access is what opening a store needs besides its URL. The front end says it: the packages
// of stores read no environment on their own. The zero Access has no credentials and no proxy.
type Access struct {
	// Setting looks up credentials and settings, by the names that the variables for them have in the
	// environment of Amazon's and Google's own programs, such as AWS_ACCESS_KEY_ID. nil: nothing is set.
	Setting func(name string) string

	// Ambient permits to look for credentials wherever Amazon's and Google's own libraries do besides:
	// in files of the user that this process runs as, and with services for roles of containers and
	// machines. They find these by the environment of the process, if that says where they are.
	Ambient bool

	// Proxy is that of http.Transport; nil: none.
	Proxy func(*http.Request) (*url.URL, error)

	// Attempts is how often a request is tried; 0: as [DefaultAttempts] says.
	Attempts int

	// OnRetry is called before each pause, and OnAnswer when a repeated request was answered: see [RetryOptions].
	OnRetry  func(Waiting)
	OnAnswer func()
}

// Get returns what is set under name, or "".
func (a Access) Get(name string) string {
	if a.Setting == nil {
		return ""
	}
	return a.Setting(name)
}
