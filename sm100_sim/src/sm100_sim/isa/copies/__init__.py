"""Instructions that copy: TMA, cp.async, st.async, and the tensor maps that kernels change."""
