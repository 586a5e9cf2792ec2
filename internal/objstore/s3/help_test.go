package s3_test

import (
	"crypto/rand"
	"strings"
	"testing"
)

// prefix is one that no other test uses.
func prefix(t *testing.T) string { return "t/" + strings.ToLower(rand.Text()[:10]) }
