package file

import "time"

// SetLockPatience sets how long the lock is waited for, and returns what it was.
func SetLockPatience(d time.Duration) time.Duration {
	old := lockPatience
	lockPatience = d
	return old
}
