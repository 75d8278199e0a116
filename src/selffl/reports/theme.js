try { document.documentElement.dataset.theme = localStorage.getItem("selffl-theme") || "auto"; } catch { }
