package kernel

import "testing"

func TestReleaseAtLeast(t *testing.T) {
	for release, want := range map[string]bool{
		"6.18.44-fc": true, "6.18": true, "6.18-rc1": true, "6.19.0": true, "7.0.1": true, "10.2": true,
		"6.12.38+deb13-cloud-amd64": false, "5.19": false, "6": false, "": false, "linux": false,
	} {
		if got := releaseAtLeast(release, 6, 18); got != want {
			t.Errorf("%q: %v", release, got)
		}
	}
}
