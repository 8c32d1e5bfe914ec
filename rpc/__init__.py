"""What every gRPC part shares: errors and their status, tensors on the wire, channel options, the server shell."""
