package objstore

import (
	"net/http"
	"net/url"
)

// Access is what opening a store needs besides its URL. The front end provides it: the packages
// of stores never read the environment themselves. The zero Access has no credentials and no proxy.
type Access struct {
	// Setting looks up credentials and settings, by the names that the variables for them have in the
	// environment of Amazon's and Google's own programs, such as AWS_ACCESS_KEY_ID. nil: nothing is set.
	Setting func(name string) string

	// Ambient also allows credentials from all other places where Amazon's and Google's own libraries find
	// them: files of the user that this process runs as, and services for roles of containers and machines.
	// The libraries find these places by the environment of the process.
	Ambient bool

	// Proxy is that of http.Transport; nil: none.
	Proxy func(*http.Request) (*url.URL, error)

	// Attempts is the number of attempts at a request; 0: [DefaultAttempts].
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
