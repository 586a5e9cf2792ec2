package mcp

import sdk "github.com/modelcontextprotocol/go-sdk/mcp"

// MCP returns the server of the SDK, for other transports than Serve's.
func (s *Server) MCP() *sdk.Server { return s.mcp }
